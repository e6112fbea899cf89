from __future__ import annotations

import importlib.util
import json

import pytest

from foredraft.cli import doctor
from foredraft.cli.main import run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(doctor, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FOREDRAFT_KERNELS", raising=False)


def test_the_report_has_what_a_person_asks_for(capsys) -> None:
    assert run(["doctor"]) == 0
    labels = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    expected = ["foredraft", "machine", "kernels", "threads", "memory", "models", "from the hub", "packed weights"]
    assert labels[: len(expected)] == expected
    assert "free disk" in labels


def test_the_report_as_json(capsys, tmp_path) -> None:
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "a.gguf").write_bytes(bytes(1234))
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["core"]["kernel_set"] == report["core"]["kernel_sets"][0]
    assert report["core"]["kernel_sets"][-1] == "portable"
    assert report["core"]["threads"] >= 1
    assert report["core"]["read_gb_per_s"] > 0
    assert report["caches"]["models"] == {"path": str(tmp_path / "home" / "models"), "bytes": 1234}
    assert report["caches"]["packed_weights"]["bytes"] == 0


def test_a_kernel_set_may_be_forced_if_it_can_run(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_KERNELS", "portable")
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["core"]["kernel_set"] == "portable"
    monkeypatch.setenv("FOREDRAFT_KERNELS", "mmx")
    assert run(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "core            unusable" in captured.out
    assert "FOREDRAFT_KERNELS=mmx cannot run here; choose one of: " in captured.err


def test_missing_extras_come_with_their_cure(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torch", "llama_cpp") else found(name)
    )
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'extra hf        torch not installed: pip install "foredraft[hf]"' in lines
    assert not any(line.startswith("extra train") for line in lines)  # there is no training yet
    assert 'extra peers     llama_cpp, torch not installed: pip install "foredraft[peers]"' in lines

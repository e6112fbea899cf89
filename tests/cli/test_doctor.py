from __future__ import annotations

import importlib.util
import json
import os

import pytest

from foredraft.cli import doctor
from foredraft.cli.main import run
from foredraft.models.packed_cache import Origin, PackedTensor, load_packed


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


def test_damaged_packed_weights_come_with_their_cure(capsys, tmp_path) -> None:
    packed = tmp_path / "home" / "packed"
    tensors = [PackedTensor(name, name, "Q4A", 16, 32, 10_000) for name in "abcde"]
    for name in ("sound", "one", "all"):
        load_packed(packed, Origin(f"/{name}.gguf", "0" * 16, ""), tensors, lambda tensor, out: out.fill(7), 1)
    for name, places in (("one", [-12288]), ("all", [-12288 * i for i in range(1, 6)])):
        with open(packed / f"{name}-{'0' * 16}.fdp", "r+b") as file:
            for place in places:
                file.seek(place, os.SEEK_END)
                file.write(b"\x06")
    (packed / "odd.fdp").write_bytes(b"FDPACKED")

    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    indent, cure = " " * 16, "remove the file and they are made again"
    assert f"{indent}sound-{'0' * 16}.fdp: sound" in lines
    assert f"{indent}{packed}/one-{'0' * 16}.fdp: damaged: e; {cure}" in lines
    assert f"{indent}{packed}/all-{'0' * 16}.fdp: damaged: a, b, c and 2 more; {cure}" in lines
    assert f"{indent}{packed}/odd.fdp: not packed weights of this version of foredraft; {cure}" in lines

    assert run(["doctor", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["caches"]["packed_weights"]["files"]
    assert [file["damaged_tensors"] for file in files] == [list("abcde"), [], ["e"], []]
    assert [file["problem"] is None for file in files] == [False, False, False, True]


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
    assert 'extra hf        torch not installed: pip install ".[hf]" in a clone of the repository' in lines
    assert not any(line.startswith("extra train") for line in lines)  # there is no training yet
    missing = "extra peers     llama_cpp, torch not installed: "
    assert missing + 'pip install ".[peers]" in a clone of the repository' in lines

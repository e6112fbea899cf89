from __future__ import annotations

import mmap
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from foredraft.errors import DownloadError, ModelFileError
from foredraft.models import hub
from foredraft.models.catalogue import CATALOGUE
from foredraft.models.hub import list_models, model_files, pull, remove_model, resolve
from foredraft.models.packed_cache import LAYOUT_VERSION, PackedTensor, identify, load_packed

from .gguf_bytes import STRING, entry, make_file
from .servers import local_hub

GGUF = make_file([entry("general.architecture", STRING, "llama")])
REPO = "org/Model-GGUF"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("FOREDRAFT_HOME", str(home))
    monkeypatch.delenv("FOREDRAFT_OFFLINE", raising=False)
    return home


@pytest.fixture
def local(monkeypatch):
    with local_hub({REPO: {"README.md": b"", "model-Q4_K_M.gguf": GGUF}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server


def put_model(home: Path, name: str, content: bytes = GGUF) -> Path:
    path = home / "models" / f"{name}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def pack(home: Path, model: Path) -> Path:
    """Repacked weights of a model: one tensor of 8 bytes."""
    before = set((home / "packed").glob("*"))
    tensor = PackedTensor("a", "a", "F32", 1, 2, 8)
    load_packed(home / "packed", identify(model, [(model, [(8, 16)])], None), [tensor], lambda tensor, out: None, 1)
    (path,) = set((home / "packed").glob("*.fdp")) - before
    return path


def test_home_directory(monkeypatch, tmp_path):
    assert hub.models_directory() == tmp_path / "home" / "models"
    monkeypatch.setenv("FOREDRAFT_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.home_directory() == Path("/x/foredraft")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert hub.packed_directory() == Path("/h/.cache/foredraft/packed")


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "own.gguf"
    file.write_bytes(GGUF)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("~/own.gguf") == file


def test_a_catalogue_name_on_disk_needs_no_network(home, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    path = put_model(home, "smollm2-135m")
    assert resolve("smollm2-135m") == path


def test_a_catalogue_name_is_pulled_on_first_use(home, monkeypatch):
    pulled = []

    def pull_entry(entry, directory, progress):
        progress(1, 2)
        pulled.append((entry.name, directory))
        return put_model(home, entry.name)

    monkeypatch.setattr(hub, "pull_entry", pull_entry)
    seen = []
    assert resolve("gemma3-270m", lambda done, total: seen.append((done, total))).exists()
    resolve("gemma3-270m")
    assert pulled == [("gemma3-270m", home / "models")]
    assert seen == [(1, 2)]


@pytest.mark.parametrize("header", [b"[]", b"{}", b'"text"', b"{\xff}", b'{"path": 5}'])
def test_repacked_weights_with_an_odd_header_are_listed_and_removed(home, header):
    path = home / "packed" / "x.fdp"
    path.parent.mkdir(parents=True)
    raw = struct.pack("<8sIII", b"FDPACKED", LAYOUT_VERSION, len(header), zlib.crc32(header)) + header
    path.write_bytes(raw)
    assert [(model.name, model.packed_bytes) for model in list_models()] == [(str(path), len(raw))]
    assert remove_model(str(path)) == len(raw)
    assert list_models() == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("smolm2-135m", r"did you mean smollm2-135m\?"),
        ("qwen2.5-coder", r"did you mean qwen2.5-coder-"),
        ("zzz", "known names: smollm2-135m, "),
        ("./absent.gguf", r"\./absent.gguf: no such file"),
        ("models/absent.gguf", "models/absent.gguf: no such file"),
        ("a/b/c", "a/b/c: no such file"),
        ("../..x/y", "no such file"),
        ("~no.such.user/x", "no such file"),
    ],
)
def test_unknown_names_are_refused_in_one_line(spec, reason):
    with pytest.raises(ModelFileError, match=reason) as caught:
        resolve(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["smollm2-135m", REPO, f"{REPO}:model-Q4_K_M.gguf"])
def test_offline_forbids_downloads(spec, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    with pytest.raises(DownloadError, match="FOREDRAFT_OFFLINE"):
        resolve(spec)


def test_hub_id(local, home, monkeypatch):
    path = resolve(REPO)
    assert path == home / "hub" / REPO / "model-Q4_K_M.gguf"
    assert path.read_bytes() == GGUF
    assert pull(REPO) == path
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    assert resolve(REPO) == resolve(f"{REPO}:model-Q4_K_M.gguf") == path


def test_hub_id_with_a_file(local, home):
    local.files[REPO] |= {"model-Q8_0.gguf": GGUF + b"8", "sub/model-F16.gguf": GGUF + b"16"}
    assert resolve(f"{REPO}:model-Q8_0.gguf").read_bytes() == GGUF + b"8"
    assert resolve(f"{REPO}:sub/model-F16.gguf").read_bytes() == GGUF + b"16"
    assert resolve(f"{REPO}:model-Q4_K_M.gguf").read_bytes() == GGUF


def test_hub_id_prefers_q4_k_m(local):
    local.files[REPO] |= {"model-Q8_0.gguf": b"", "mmproj-model-Q4_K_M.gguf": b""}
    assert resolve(REPO).name == "model-Q4_K_M.gguf"


def spoil_choice(server):
    server.files[REPO] = {"model-Q8_0.gguf": GGUF, "model-F16.gguf": GGUF}


@pytest.mark.parametrize(
    ("spec", "spoil", "error", "reason"),
    [
        (REPO, spoil_choice, ModelFileError, f"write {REPO}:FILE with one of model-Q8_0.gguf, model-F16.gguf"),
        (
            REPO,
            lambda server: server.files.update({REPO: {"a.bin": b""}}),
            ModelFileError,
            "neither a .gguf file nor safe.* --backend hf",
        ),
        (f"{REPO}:absent.gguf", lambda server: None, DownloadError, "has no file absent.gguf"),
        (
            "org/absent",
            lambda server: None,
            DownloadError,
            "org/absent is no path here, and not on .* or private there",
        ),
        (
            "org/absent:a.gguf",
            lambda server: None,
            DownloadError,
            "org/absent is no path here, and not on .* or private there",
        ),
        (REPO, lambda server: server.gated.add(REPO), DownloadError, "is gated: accept its terms on .* HF_TOKEN"),
    ],
)
def test_hub_errors_are_one_line(local, home, spec, spoil, error, reason):
    spoil(local)
    with pytest.raises(error, match=reason) as caught:
        resolve(spec)
    assert "\n" not in str(caught.value)
    assert not list((home / "hub").rglob("*.gguf"))


def test_an_unreachable_hub_is_one_line(monkeypatch):
    for endpoint in ("http://127.0.0.1:1", "nonsense"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(DownloadError, match=f"cannot reach {endpoint} .*; check the network") as caught:
            resolve(REPO)
        assert "\n" not in str(caught.value)


def test_nothing_on_disk(home):
    assert list_models() == []
    assert model_files("smollm2-135m") == []
    assert not home.exists()


def test_list_and_remove(local, home, tmp_path):
    catalogue = put_model(home, "smollm2-135m")
    from_hub = resolve(REPO)
    own = tmp_path / "own.gguf"
    own.write_bytes(GGUF)
    packed = {model: pack(home, model) for model in (catalogue, from_hub, own)}
    parts = home / "models" / ".gemma3-270m.parts"
    parts.mkdir()
    (parts / "part-01").write_bytes(b"12345")

    hub_id = f"{REPO}:model-Q4_K_M.gguf"
    listed = {model.name: model for model in list_models()}
    assert list(listed) == sorted(["smollm2-135m", hub_id, "gemma3-270m", str(own)])
    for name, path in (("smollm2-135m", catalogue), (hub_id, from_hub), (str(own), own)):
        assert (listed[name].path, listed[name].file_bytes) == (path, len(GGUF))
        assert listed[name].packed_bytes == packed[path].stat().st_size
        assert packed[path] in model_files(name)
    assert (listed["gemma3-270m"].path, listed["gemma3-270m"].file_bytes) == (None, 5)
    assert [listed[name].is_removable for name in ("smollm2-135m", str(own))] == [True, False]

    assert remove_model("smollm2-135m") == len(GGUF) + listed["smollm2-135m"].packed_bytes
    assert remove_model(REPO) == len(GGUF) + listed[hub_id].packed_bytes
    assert remove_model("gemma3-270m") == 5
    assert remove_model(str(own)) == listed[str(own)].packed_bytes
    assert list_models() == []
    assert [path.suffix for path in home.rglob("*") if path.is_file() and path.stat().st_size] == []
    assert own.exists()


def test_damaged_repacked_weights_can_be_removed(home):
    path = home / "packed" / "x.fdp"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"FDPACKED garbage")
    (model,) = list_models()
    assert (model.name, model.path, model.packed_bytes) == (str(path), path, 16)
    assert remove_model(str(path)) == 16
    assert list_models() == []


def test_unfinished_repacked_weights_are_listed_and_removed(home):
    model = put_model(home, "smollm2-135m")
    packed = pack(home, model)
    part = packed.rename(packed.with_suffix(".part"))
    (listed,) = list_models()
    assert (listed.name, listed.packed_bytes) == ("smollm2-135m", part.stat().st_size)
    assert remove_model("smollm2-135m") == len(GGUF) + listed.packed_bytes
    assert not part.exists()


def test_removing_what_is_not_there():
    with pytest.raises(ModelFileError, match="not on disk"):
        remove_model("smollm2-135m")
    with pytest.raises(ModelFileError, match="did you mean"):
        remove_model("smollm2")


def test_names_that_would_leave_the_cache():
    for name in ("../..", "a/..", "..", "org/repo:../../x.gguf", "/etc/passwd"):
        with pytest.raises(ModelFileError):
            remove_model(name)


def test_resolving_imports_neither_torch_nor_transformers(home):
    put_model(home, "smollm2-135m")
    code = (
        "import sys; from foredraft.models import hub, gguf, tokenizer, chat_template; hub.resolve('smollm2-135m');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.real
def test_the_real_file_has_its_hash(monkeypatch):
    import hashlib

    monkeypatch.undo()
    entry = CATALOGUE["smollm2-135m"]
    path = resolve(entry.name)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert hashlib.sha256(mapped).hexdigest() == entry.sha256

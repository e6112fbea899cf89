"""Images of messages: what is read, and what a hostile client may send."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foredraft.errors import MissingExtraError, ParameterError
from foredraft.models import images
from foredraft.models.images import MAX_IMAGES, ImageLoader
from tests.models.eyes import data_url, file_of, picture, url_part

PICTURE = picture()


def load(part: dict[str, Any], *, files: bool = False) -> Any:
    loader = ImageLoader(files=files)
    loader.load(part, "messages[0].content[1]")
    return loader.images[0]


def refusal(part: dict[str, Any], *, files: bool = False) -> ParameterError:
    with pytest.raises(ParameterError) as raised:
        load(part, files=files)
    assert "\n" not in str(raised.value)
    return raised.value


def url(text: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": text}}


def png_of_size(width: int, height: int) -> bytes:
    """A PNG of so many pixels in a few bytes: all of them zero, and the first two million there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(min((width // 8 + 1) * height, 2_000_000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_files_without_loss(kind: str) -> None:
    flat = Image.new("RGB", (9, 5), (10, 200, 30))
    read = load(url(data_url(file_of(flat, kind, **({"lossless": True} if kind == "WEBP" else {})), f"image/{kind}")))
    assert read.mode == "RGB"
    assert np.array_equal(np.asarray(read), np.asarray(flat))


def test_a_photograph_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    read = load(url(data_url(file_of(PICTURE, "JPEG", exif=exif), "image/jpeg")))
    assert read.size == (PICTURE.height, PICTURE.width)


def test_other_ways_to_write_it() -> None:
    text = data_url(file_of(PICTURE))
    for part in ({"type": "image_url", "image_url": text}, {"type": "input_image", "image_url": text}):
        assert load(part).tobytes() == PICTURE.tobytes()
    loud = text.replace("data:image/png;base64", "DATA:IMAGE/PNG;BASE64")
    for spelling in (text, loud):
        assert load({"type": "image", "image": spelling}, files=True).tobytes() == PICTURE.tobytes()


def test_callers_of_the_library_name_files(tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(file_of(PICTURE))
    for image in (path, str(path), PICTURE, PICTURE.convert("RGBA")):
        assert load({"type": "image", "image": image}, files=True).tobytes() == PICTURE.tobytes()
    assert "cannot be read: No such file" in str(refusal({"type": "image", "image": tmp_path / "no"}, files=True))
    for no_file in (tmp_path, "/dev/zero"):
        assert "is no file" in str(refusal({"type": "image", "image": no_file}, files=True))
    assert "is a int, and no path" in str(refusal({"type": "image", "image": 5}, files=True))


def test_clients_name_none(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(file_of(PICTURE))
    for part in ({"type": "image", "image": str(path)}, url(str(path)), {"type": "image", "image": PICTURE}):
        assert "must be a data URL" in str(refusal(part))
    assert "none is fetched" in str(refusal(url(path.as_uri())))


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1/a.png", "https://example.org/a.png", "ftp://a/b", "FILE:///etc/x"]
)
@pytest.mark.parametrize("files", [False, True])
def test_nothing_is_fetched(address: str, files: bool) -> None:
    error = refusal(url(address), files=files)
    assert error.field == "messages[0].content[1].image_url.url"
    assert "none is fetched: send it as a data URL" in str(error)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url"}, "must be a data URL"),
        ({"type": "image_url", "image_url": {}}, "must be a data URL"),
        ({"type": "image_url", "image_url": {"url": 5}}, "must be a data URL"),
        ({"type": "image"}, "image is missing"),
        (url(""), "must be a data URL"),
        (url("data:image/png,abc"), "no data URL of an image"),
        (url("data:text/html;base64,YWJj"), "no data URL of an image"),
        (url("data:image/png;base64,a*b"), "is not base64"),
        (url("data:image/png;base64,a"), "is not base64"),
        (url("data:image/png;base64,"), "is no image"),
        (url(data_url(b"hello")), "is no image"),
        (url(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n")), "is no image"),
        (url(data_url(file_of(PICTURE, "BMP"))), "is no image"),
        (url(data_url(file_of(PICTURE, "TIFF"))), "is no image"),
        (url(data_url(file_of(PICTURE)[:200])), "is a broken image"),
        (url(data_url(file_of(PICTURE)[:60] + b"\0" * 40 + file_of(PICTURE)[100:])), "broken"),
        (url(data_url(file_of(picture(0, 400, 300), "JPEG")[:900])), "is a broken image"),
    ],
)
def test_what_is_no_image(part: dict[str, Any], problem: str) -> None:
    assert problem in str(refusal(part))


@pytest.mark.parametrize("size", [(8000, 8000), (10_000, 9_500), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_not_unpacked(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("the pixels were unpacked"))
    assert "is too large" in str(refusal(url(data_url(png_of_size(*size)))))


def test_a_thread_of_pixels_is_not_blown_up() -> None:
    """Processors would scale its thin edge to hundreds of pixels, and the other with it."""
    assert load(url(data_url(file_of(Image.new("RGB", (50, 1)))))).size == (50, 1)
    for size in ((51, 1), (1, 2000)):
        assert "one edge may be 50 times the other" in str(refusal(url(data_url(file_of(Image.new("RGB", size))))))


def test_all_images_of_a_request_share_one_limit() -> None:
    loader = ImageLoader(files=False)
    part = url(data_url(png_of_size(4000, 2000)))
    for _ in range(6):
        loader.load(part, "here")
    with pytest.raises(ParameterError, match="all images together"):
        loader.load(part, "here")


def test_number_and_bytes_are_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loader = ImageLoader(files=False)
    for _ in range(MAX_IMAGES):
        loader.load(url_part(picture(0, 2, 2)), "here")
    with pytest.raises(ParameterError, match="here is one image too many: a request takes 32"):
        loader.load(url_part(picture(0, 2, 2)), "here")
    (tmp_path / "large.png").write_bytes(file_of(PICTURE))
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    assert "has more than 100 bytes" in str(refusal(url_part(PICTURE)))
    assert "has more than 100 bytes" in str(refusal({"type": "image", "image": tmp_path / "large.png"}, files=True))


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    text = data_url(file_of(PICTURE))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="Pillow not installed"):
        load(url(text))


def test_text_imports_neither_pillow_nor_torch() -> None:
    code = (
        "import sys, foredraft.cli.main, foredraft.cli.generate, foredraft.server.app, foredraft.engine.llm\n"
        "from foredraft.models.chat_template import encode_chat\n"
        "from foredraft.testing import ByteTokenizer\n"
        "encode_chat(ByteTokenizer(), [{'role': 'user', 'content': 'hello'}])\n"
        "print([name for name in ('PIL', 'torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ}, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_only_the_first_picture_of_an_animation() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), (red, 0, 0)) for red in (250, 10)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert load(url(data_url(file.getvalue(), "image/gif"))).getpixel((0, 0))[0] > 200

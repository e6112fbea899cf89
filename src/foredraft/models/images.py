"""The images of a request: from data URLs, files and objects of Pillow to pixels, within limits.

Nothing is ever fetched, and a client's request opens no file: only callers of the library name files. Pillow is
imported when the first image comes.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.errors import MissingExtraError, ParameterError

#: Of one image as it is sent. Of all images of a request together: pixels once they are decoded, and their number.
MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50_000_000
MAX_IMAGES = 32
#: Processors scale the shorter edge to hundreds of pixels, whatever becomes of the longer one: a few bytes could be
#: made gigabytes.
MAX_RATIO = 50
#: What is tried. Pillow knows dozens of formats more, some of them programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]*/?[\w.+-]*)(;[\w.=+-]+)*;base64,", re.ASCII | re.IGNORECASE)


class ImageLoader:
    """Loads the images of one request in their order. files: they may be named by path, or be objects of Pillow."""

    def __init__(self, *, files: bool) -> None:
        self.images: list[Any] = []  # PIL.Image.Image, RGB
        self._files = files
        self._num_pixels = 0

    def load(self, part: Mapping[str, Any], where: str) -> None:
        """Of a content's part, as OpenAI writes it, or `{"type": "image", "image": ...}`. Raises ParameterError."""
        if len(self.images) == MAX_IMAGES:
            raise ParameterError(where, f"is one image too many: a request takes {MAX_IMAGES}")
        source, where = _source_of(part, where)
        if isinstance(source, str) and source[:5].lower() == "data:":
            image = self._decode(_bytes_of_url(source, where), where)
        elif isinstance(source, str) and re.match("[a-zA-Z][a-zA-Z0-9+.-]*:/", source):
            raise ParameterError(where, "names an image elsewhere, and none is fetched: send it as a data URL")
        elif not self._files:
            raise ParameterError(where, "must be a data URL: data:image/png;base64,...")
        elif isinstance(source, str | os.PathLike):
            image = self._decode(_bytes_of_file(Path(os.path.expanduser(os.fspath(source))), where), where)
        elif hasattr(source, "convert") and hasattr(source, "size"):
            image = self._convert(source, where)
        else:
            raise ParameterError(where, f"is a {type(source).__name__}, and no path, data URL or image of Pillow")
        self.images.append(image)

    def _decode(self, data: bytes, where: str) -> Any:
        try:
            from PIL import Image
        except ImportError:
            raise MissingExtraError('Pillow not installed: pip install ".[hf]" in a clone of the repository') from None
        try:
            opened = Image.open(io.BytesIO(data), formats=FORMATS)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise ParameterError(where, _too_large("more than Pillow opens")) from None
        except Exception:  # whatever a hostile file makes of a parser
            raise ParameterError(where, f"is no image: {', '.join(FORMATS)} are read") from None
        with opened:
            return self._convert(opened, where)

    def _convert(self, image: Any, where: str) -> Any:
        """As Transformers' own `load_image` does it, the first picture of an animation."""
        from PIL import ImageOps

        width, height = image.size
        self._num_pixels += width * height
        if self._num_pixels > MAX_PIXELS:
            raise ParameterError(where, _too_large(f"{width} x {height}"))
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ParameterError(
                where, f"is {width} x {height}, and one edge may be {MAX_RATIO} times the other: cut it"
            )
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            raise ParameterError(where, f"is a broken image: {reason}") from None


def _too_large(size: str) -> str:
    return f"is too large ({size} pixels): a request takes {MAX_PIXELS:,}, all images together; scale it down"


def _source_of(part: Mapping[str, Any], where: str) -> tuple[Any, str]:
    """What the part holds, and where."""
    if part.get("type") == "image":
        if part.get("image") is None:
            raise ParameterError(f"{where}.image", "is missing")
        return part["image"], f"{where}.image"
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url, where = url.get("url"), f"{where}.image_url.url"
    else:
        where = f"{where}.image_url"
    if not isinstance(url, str):
        raise ParameterError(where, "must be a data URL: data:image/png;base64,...")
    return url, where


def _bytes_of_url(url: str, where: str) -> bytes:
    match = _DATA_URL.match(url[:200])
    if match is None or not match["type"].lower().startswith("image/"):
        raise ParameterError(where, "is no data URL of an image: data:image/png;base64,...")
    if (len(url) - match.end()) * 3 // 4 > MAX_BYTES:
        raise ParameterError(where, f"has more than {MAX_BYTES:,} bytes: scale the image down")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise ParameterError(where, "is not base64") from None


def _bytes_of_file(path: Path, where: str) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a device may have no end
            raise ParameterError(where, f"is no file ({path})")
        if path.stat().st_size > MAX_BYTES:
            raise ParameterError(where, f"has more than {MAX_BYTES:,} bytes: scale the image down")
        return path.read_bytes()
    except OSError as error:
        raise ParameterError(where, f"cannot be read: {error.strerror or error} ({path})") from None

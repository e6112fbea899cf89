"""A reader of images for the byte tokenizer, whose pad token stands for a piece of eight columns; and images."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from PIL import Image

from foredraft.errors import ForedraftError
from foredraft.models.base import ReadImage
from foredraft.testing import ByteTokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'image' and message.role != 'system' %}<pad>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: What the processor refuses, and what it takes and the model cannot read.
REFUSED_WIDTH, BLINDING_WIDTH = 7, 9


@dataclass(frozen=True)
class Eyes:
    refusal: str | None = None
    as_parts: bool = True
    image_token_id: int = ByteTokenizer.PAD

    def read(self, image: Any, /) -> ReadImage:
        if image.width == REFUSED_WIDTH:
            raise ValueError("seven columns are too few")
        broken = ForedraftError("the model could not read an image") if image.width == BLINDING_WIDTH else None
        return ReadImage([self.image_token_id] * max(1, image.width // 8), blake2b(image.tobytes()).digest(), broken)


def seeing_tokenizer() -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def picture(seed: int = 0, width: int = 24, height: int = 16) -> Any:
    """Of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def url_part(image: Any) -> dict[str, Any]:
    """As clients of OpenAI write it."""
    return {"type": "image_url", "image_url": {"url": data_url(file_of(image)), "detail": "auto"}}


def ask(text: str, *images: Any, role: str = "user") -> dict[str, Any]:
    """A message with its images before its text."""
    return {"role": role, "content": [*map(url_part, images), {"type": "text", "text": text}]}

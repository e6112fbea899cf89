"""Images from files, as parts of a message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from foredraft.errors import ParameterError
from foredraft.models.images import ImageLoader

image_option = click.option(
    "--image",
    "images",
    metavar="FILE",
    callback=lambda _, __, images: _checked(images),
    multiple=True,
    help="A PNG, JPEG, WebP or GIF to ask about; may be repeated.",
)


def user_message(text: str, images: Sequence[str]) -> dict[str, Any]:
    """The images, and then the text."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if images else text}


def _checked(images: Sequence[str]) -> Sequence[str]:
    """What is wrong with one of them is said before a model is loaded."""
    messages = [user_message("", images)]
    with blaming_files(messages):
        for i, part in enumerate(messages[0]["content"] if images else ()):
            if part["type"] == "image":
                ImageLoader(files=True).load(part, f"messages[0].content[{i}]")
    return images


@contextmanager
def blaming_files(messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Errors of an image name its file instead of its place in the messages."""
    try:
        yield
    except ParameterError as error:
        place = re.match(r"messages\[(\d+)\]\.content\[(\d+)\]", error.field)
        if place is None:
            raise
        file = messages[int(place[1])]["content"][int(place[2])]["image"]
        raise ParameterError(f"--image {file}", str(error).removeprefix(error.field + " ")) from None

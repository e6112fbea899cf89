"""Processors of Transformers: images to the tokens and pixels that a model reads, one image at a time.

So an image is the same to a model whatever comes with it in a prompt, and texts that begin with it share what was
computed of it. That the model's own way, all images at once, comes to the same, `check_reader` finds out at load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.import_utils import is_torchvision_available

from foredraft.errors import ChatTemplateError, ForedraftError, UnsupportedModelError
from foredraft.models.base import ImageReader, ReadImage, TextTokenizer
from foredraft.models.chat_template import render_chat, with_pictures
from foredraft.models.hf.probe import PictureAnswer, probe_pictures
from foredraft.types import PicturePrompt


class HFImageReader:
    """A processor as an `ImageReader`; see there for the methods."""

    def __init__(self, processor: Any, tokenizer: TextTokenizer) -> None:
        """Raises UnsupportedModelError if there is no one token for an image."""
        self.refusal: str | None = None
        self._processor = processor
        self._lock = Lock()  # fast tokenizers are not for two threads
        token = getattr(processor, "image_token", None)
        self.token = token if isinstance(token, str) else ""
        ids = tokenizer.encode(self.token, parse_special=True)
        if len(ids) != 1:
            raise UnsupportedModelError(f"{type(processor).__name__} has no token for an image")
        self.image_token_id = ids[0]
        self.as_parts = _takes_parts(tokenizer)

    def read(self, image: Any, /) -> ReadImage:
        """The inputs are the model's, for a prompt of the image alone."""
        content = blake2b(f"{image.width} {image.height} ".encode() + image.tobytes(), digest_size=32)
        inputs = self.process(self.token, [image])
        return ReadImage(inputs["input_ids"][0].tolist(), content.digest(), inputs)

    def process(self, text: str, images: Sequence[Any]) -> Mapping[str, Any]:
        """A text with images as the library reads it. Raises ValueError."""
        try:
            with self._lock:
                made = self._processor(text=text, images=list(images), add_special_tokens=False, return_tensors="pt")
        except Exception as error:  # of sizes and shapes that a processor was not made for
            raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None
        return dict(made)


class NoImages:
    """For a model that could see, but whose images cannot be carried. An `ImageReader` that reads none."""

    image_token_id = -1

    def __init__(self, refusal: str, tokenizer: TextTokenizer) -> None:
        self.refusal = refusal
        self.as_parts = _takes_parts(tokenizer)

    def read(self, image: Any, /) -> ReadImage:
        raise ValueError(self.refusal)


class ProcessorLoader:
    """Loads the processor of a model; without torchvision one that takes no videos, since only those need it."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def from_pretrained(self, name: str, **arguments: Any) -> Any:
        try:
            factory: Any = transformers.AutoProcessor
            return factory.from_pretrained(name, **arguments)
        except (ImportError, OSError) as error:  # it says that a file is missing, too
            if is_torchvision_available():
                raise
            kind = PROCESSOR_MAPPING.get(type(self._config), None)
            try:
                return images_only(kind).from_pretrained(name, **arguments)
            except TypeError:  # there is none, or not without videos
                raise error from None


def images_only(kind: Any) -> Any:
    """The class of a processor without its part for videos."""

    class ImagesOnly(kind):  # type: ignore[misc]  # a class of the library
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    return ImagesOnly


def check_reader(model: Any, reader: HFImageReader, tokenizer: TextTokenizer, name: str) -> None:
    """Hold what the engine makes of two images against the model's own way. Raises UnsupportedModelError."""
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    try:
        text = render_chat(tokenizer, chat)
    except ChatTemplateError as error:
        raise UnsupportedModelError(f"its chat template takes none: {error}") from None
    if text.count(reader.token) != 1:
        raise UnsupportedModelError("its chat template writes none")
    text = f"a{reader.token}b{reader.token}c"
    try:
        images = [_some_image(60, 40), _some_image(40, 90)]
        own = reader.process(text, images)
        read = [reader.read(image) for image in images]
    except ValueError as error:
        raise UnsupportedModelError(f"its processor failed: {error}") from None
    prompt = with_pictures(tokenizer.encode(text, parse_special=True), read, reader.image_token_id)
    if list(prompt) != own["input_ids"][0].tolist():
        raise UnsupportedModelError("its processor reads one image in another way than two")
    probe_pictures(model, _own_answer(model, own, prompt), name=name)


def read_alike(one: ImageReader, other: ImageReader) -> bool:
    """Whether two models read the same of an image, so that one's pictures can be the other's."""
    image = _some_image(60, 40)
    first, second = one.read(image), other.read(image)
    return (
        first.tokens == second.tokens
        and first.inputs.keys() == second.inputs.keys()
        and all(torch.equal(value, second.inputs[key]) for key, value in first.inputs.items())
    )


def _own_answer(model: Any, inputs: Mapping[str, Any], prompt: PicturePrompt) -> PictureAnswer:
    device = model.get_input_embeddings().weight.device
    own = model.generate(
        **{key: value.to(device) for key, value in inputs.items()},
        do_sample=False,
        min_new_tokens=3,
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = [step[0].float().cpu().numpy() for step in own.logits]
    return PictureAnswer(prompt, own.sequences[0, -3:-1].tolist(), logits)


def _takes_parts(tokenizer: TextTokenizer) -> bool:
    """Whether a content of parts comes out as the text in it."""
    try:
        text = render_chat(tokenizer, [{"role": "user", "content": [{"type": "text", "text": "seven"}]}])
        return "seven" in text and "'text'" not in text
    except ForedraftError:
        return False


def _some_image(width: int, height: int) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)

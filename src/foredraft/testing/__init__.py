"""Tiny models, a byte tokenizer and other doubles that test the whole system in milliseconds."""

from foredraft.testing.byte_tokenizer import ByteTokenizer
from foredraft.testing.tiny_gguf import make_tiny_gguf
from foredraft.testing.tiny_model import TinyModel

__all__ = ["ByteTokenizer", "TinyModel", "make_tiny_gguf"]

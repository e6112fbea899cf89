"""Models: files, tokenizers, and the one protocol that the engine and model drafters drive."""

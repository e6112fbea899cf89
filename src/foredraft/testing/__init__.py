"""Tiny models, a byte tokenizer and other doubles that test the whole system in milliseconds."""

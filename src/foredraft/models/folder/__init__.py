"""Folders of Transformers on the CPU core: config.json, safetensors and tokenizer.json, read without that library."""

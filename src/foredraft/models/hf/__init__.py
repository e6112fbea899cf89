"""The Transformers backend: any causal language model of that library on the engine's cache.

Needs the extra `[hf]`; modules that import torch are imported when a model of this kind is asked for, never before.
"""

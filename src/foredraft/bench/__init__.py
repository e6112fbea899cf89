"""Measurement: plain against speculative against peers, on the same prompts in the same run."""

"""Verification, sampling and trees: pure functions, each with its source. No I/O, no clock, no configuration."""

"""Lossless speculative decoding: the output of the target model, sooner."""

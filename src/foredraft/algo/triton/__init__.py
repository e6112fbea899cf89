"""Sampling on GPUs in Triton: fused processing, verification and residual draws; each names its reference."""

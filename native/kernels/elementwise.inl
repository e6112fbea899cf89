// RMS norm, rotary embedding, gated activations: one row at a time.

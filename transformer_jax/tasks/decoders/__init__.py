"""Training and use of causal decoders."""

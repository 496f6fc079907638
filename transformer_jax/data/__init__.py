"""Text to tokens to fixed-shape batches, in NumPy; no jax arrays."""

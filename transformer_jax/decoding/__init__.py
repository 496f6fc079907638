"""Decoding with any model's step function: greedy and beam search, sampling, speculative decoding."""

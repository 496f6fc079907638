"""Greedy and beam search over any model's step function."""

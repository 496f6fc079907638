"""Kernel regression, the smallest model with attention."""

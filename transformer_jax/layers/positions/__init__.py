"""Positions of tokens and patches: absolute, relative and rotary."""

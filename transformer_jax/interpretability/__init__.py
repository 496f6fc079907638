"""Inspection: a model's named values returned or replaced, and what is computed from them."""

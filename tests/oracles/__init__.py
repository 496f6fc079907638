"""Slow references in NumPy float64, written from the formulas only."""

"""Fitting the kernel of a kernel regression."""

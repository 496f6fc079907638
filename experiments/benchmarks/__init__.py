"""Comparisons with other packages and measurements of speed: `python -m experiments.benchmarks.NAME --help`."""

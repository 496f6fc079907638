"""Comparisons with peers and measurements of speed: `python -m experiments.benchmarks.NAME --help`."""

"""Runnable modules, one per experiment or command: `python -m experiments.NAME --help`."""

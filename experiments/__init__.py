"""One runnable module per job: `python -m experiments.NAME --help`."""

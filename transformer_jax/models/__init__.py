"""One file per step of the line: a config, its presets, the module."""

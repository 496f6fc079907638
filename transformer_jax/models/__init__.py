"""Models: a config dataclass with presets and a Flax module for each.

Every module is created as `Model(config, *, rngs, compute=ComputeOptions())`. The config defines what the model
computes, `rngs` draws the initial values and is not stored, and `compute` selects options of speed and memory,
which never change a result. Dropout is on exactly when a call passes `dropout_key`.
"""

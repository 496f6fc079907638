"""Losses, schedules, optimizers, the training step, the loop, checkpoints, metrics."""

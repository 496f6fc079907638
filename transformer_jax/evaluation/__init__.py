"""Scores: functions that yield (name, value)."""

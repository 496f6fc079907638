"""Models of decisions."""

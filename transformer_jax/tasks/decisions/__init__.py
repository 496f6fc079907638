"""Tasks on decisions."""

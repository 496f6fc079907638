"""Text to ids and back, one file a kind."""

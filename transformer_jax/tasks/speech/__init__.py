"""Tasks on speech."""

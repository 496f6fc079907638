"""Training and use of translators."""

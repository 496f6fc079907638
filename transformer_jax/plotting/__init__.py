"""Pictures: attention maps and training curves."""

"""Models that read images and texts."""

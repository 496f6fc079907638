"""Tasks of images with texts."""

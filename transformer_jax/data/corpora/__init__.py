"""Where examples come from: phrases, files, TFDS, texts."""

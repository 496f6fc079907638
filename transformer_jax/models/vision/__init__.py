"""Image encoders: ViT and its compact variants, DINO, masked autoencoders."""

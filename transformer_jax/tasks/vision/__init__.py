"""Pretraining, fine-tuning and use of image encoders."""

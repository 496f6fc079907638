"""Pretraining, fine-tuning and use of text encoders."""

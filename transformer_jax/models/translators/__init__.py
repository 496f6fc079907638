"""Encoder-decoder translators, from the LSTM of 2014 to the Transformer."""

"""Causal decoders: LSTM, GPT-2, Llama and today's blocks."""

"""Figures of attention, logit lens, similarities and training curves, and interactive pages of attention."""

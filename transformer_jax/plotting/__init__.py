"""Pictures: attention, the logit lens, similarities, training curves; one interactive page."""

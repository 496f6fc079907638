"""Inspection: return or replace a model's named values, and analyze them."""

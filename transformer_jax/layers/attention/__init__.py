"""Attention: the plain formula, faster forms of the same result, and the one function that picks among them."""

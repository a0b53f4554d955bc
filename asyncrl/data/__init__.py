"""Rows of data files, and the order in which prompts are drawn from them."""

"""Scoring by a function: the pool of worker processes, built-in functions, shaping."""

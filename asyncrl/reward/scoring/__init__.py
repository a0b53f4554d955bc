"""Scoring by a function: the pool of processes, its workers, built-in functions, shaping."""

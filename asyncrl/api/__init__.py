"""Runs and evaluations from Python programs. They go by the commands of cli/, which know nothing of this folder."""

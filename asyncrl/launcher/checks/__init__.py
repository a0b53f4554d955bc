"""The checks before a start. Each host runs the same list for its part of the run."""

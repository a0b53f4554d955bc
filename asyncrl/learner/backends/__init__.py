"""Backends of the learner: the interface, and one that trains nothing."""

"""Checkpoints on disk, without torch: where they are, which is the newest, where the run stood."""

DIGESTS = "digests.json"
"""File in the run folder: digests of the files that the newest attempt began with, by configuration key (origin.py)."""

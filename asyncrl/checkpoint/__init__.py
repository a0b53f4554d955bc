"""Checkpoints on disk, without torch: where they are, which is the newest, where the run stood."""

"""Checks before a run begins, for asyncrl-launch and asyncrl-doctor alike: one host's part of it, in seconds."""

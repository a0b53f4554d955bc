"""Checks that asyncrl works on this host's GPUs, and measures how fast it is there."""

"""Hosts that join the run and leave it."""

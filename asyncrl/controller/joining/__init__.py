"""Hosts of a run: those that are lost, that join and that leave."""

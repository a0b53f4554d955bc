"""Snapshots for the viewer: of a run that lives, or from a recording."""

"""Observers of a run: events, snapshots, timelines, lines of metrics."""

"""Instruments of a run: logs, metrics and their catalogue, states, the timeline, recorded snapshots."""

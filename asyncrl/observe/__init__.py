"""Instruments of a run: logs, metrics, states, timelines, snapshots; below them sinks, report and explanations."""

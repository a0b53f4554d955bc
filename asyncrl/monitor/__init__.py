"""Monitoring of a run: logging, metrics, state-time ledgers, recorded snapshots, and their viewers."""

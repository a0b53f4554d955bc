"""Snapshots of a run: their decoding, their recording, and the changes between two of them."""

"""Weights and optimizer state: copied, gathered, written, exported."""

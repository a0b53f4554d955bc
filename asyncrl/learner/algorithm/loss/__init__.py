"""The loss of a step: losses, corrections, divergence from a reference, statistics."""

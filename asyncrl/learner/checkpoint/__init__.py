"""Checkpoints of the learner: what the run goes on from."""

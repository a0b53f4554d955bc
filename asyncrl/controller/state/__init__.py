"""The state of a run, and the replicas that are resting."""

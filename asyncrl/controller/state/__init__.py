"""The state of a run, the actors of lost hosts, and the replicas that are resting."""

"""The loop of rank 0: the groups of a step, its plan, its training, and the version after it."""

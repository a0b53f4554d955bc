"""The plan of a step: packed rows, micro-batches, weights of tokens."""

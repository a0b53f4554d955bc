"""The plan of a step: batches, packed rows, micro-batches."""

"""The reference engine: transformers, one sequence at a time, the same in every bit each time."""

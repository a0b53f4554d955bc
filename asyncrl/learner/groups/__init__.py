"""The groups of the learner: taken once, buffered, concluded, and reported to the dataloader."""

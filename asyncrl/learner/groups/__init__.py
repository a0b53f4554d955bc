"""The groups of the learner: taken once, buffered, concluded, and told to the dataloader."""

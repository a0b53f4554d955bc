"""A rank of the learner: the model sharded by FSDP2, its updates, and the checks of both."""

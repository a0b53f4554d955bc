"""Memory of GPUs: what a learner's rank and an engine need, and how both share a GPU. Pure."""

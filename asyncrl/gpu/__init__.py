"""Memory of GPUs: what a learner's rank and an engine need, and how both share a GPU.

Only ``shares`` reads files, the environment and the driver; the other modules are pure.
"""

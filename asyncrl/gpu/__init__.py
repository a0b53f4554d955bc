"""Memory of GPUs: what a learner's rank and an engine need, and how both share a GPU.

Only ``shared_gpus`` reads files, the environment and the driver, and ``slices`` opens sockets. The other modules are
pure.
"""

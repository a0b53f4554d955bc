"""The arithmetic of training: losses, advantages, packing, the plan of a step. No processes and no sockets."""

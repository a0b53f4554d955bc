"""The arithmetic of training on a group: batch, plan, packing, losses, advantages. Without processes or sockets."""

"""The files of a checkpoint that rank 0 writes beside the shards, and checkpoints as folders for others."""

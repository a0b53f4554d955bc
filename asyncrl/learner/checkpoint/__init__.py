"""Writing checkpoints, the last writes of a run, and the export of a checkpoint."""

"""asyncrl-top: the viewer of a run. It draws snapshots, live or recorded, and changes nothing in the run."""

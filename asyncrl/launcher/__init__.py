"""Starting a run: placement, node agents, progress."""

"""The loss and the advantage that the user names: found, checked, and tried before a run."""

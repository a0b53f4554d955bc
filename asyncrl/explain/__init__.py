"""The story of one prompt group, told from the logs of all actors."""

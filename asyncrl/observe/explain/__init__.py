"""The history of one prompt group, from the logs of all actors."""

"""Lives of actors: their records, incarnations and restarts, and the members of a run."""

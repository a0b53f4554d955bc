"""The reward pool: reward functions in worker processes with hard timeouts."""

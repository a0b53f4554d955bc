"""Actors: handlers, calls, supervision, registry, clock. Knows nothing of reinforcement learning."""

"""Actors and their calls: handlers, heartbeats, supervision, the wire. Knows nothing of reinforcement learning."""

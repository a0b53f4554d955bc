"""Envelopes over ZeroMQ: framing, typed codec, sockets, keys. Knows nothing of reinforcement learning."""

"""Processes that run users' code: one pool for rewards and episodes, isolation, memory limits, and a clean end."""

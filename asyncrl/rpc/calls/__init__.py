"""Calls between actors: connections, credit, deadlines, retries, typed handlers."""

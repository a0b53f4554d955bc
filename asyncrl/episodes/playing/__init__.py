"""A worker process of the episode host, and what users' code finds in it."""

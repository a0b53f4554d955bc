"""Episode hosts: the actors that run users' code, and where its programs find the policy."""

"""The policy over HTTP, for agents that speak the APIs of others."""

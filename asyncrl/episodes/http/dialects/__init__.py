"""The HTTP APIs in which programs ask the policy. Each is a translator without sockets to one and the same call."""

"""The node agent: starts, watches and restarts the actors of one host; its guard."""

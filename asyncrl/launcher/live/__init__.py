"""Commands to a live run: join, leave, bring back, stop."""

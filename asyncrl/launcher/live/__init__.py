"""Commands to a living run: join, leave, bring back, stop."""

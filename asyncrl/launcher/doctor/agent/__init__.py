"""One episode outside a run, by default of the user's agent against a scripted policy, and what a run makes of it."""

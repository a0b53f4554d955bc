"""One episode of the user's agent against a policy that speaks by a script: what a run would make of its calls."""

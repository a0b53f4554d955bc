"""Values that the learner's loop and its backends hand to one another."""

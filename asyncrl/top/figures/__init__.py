"""Numbers that asyncrl-top shows, and the stage that sets the pace. Pure."""

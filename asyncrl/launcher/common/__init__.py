"""Terms between the launcher, its hosts and their agents: specifications, placement, signals."""

"""Loading and sharding the policy, and the checks at start."""

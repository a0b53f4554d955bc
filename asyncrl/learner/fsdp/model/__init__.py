"""The policy as a model of torch: attention over packed rows, log-probs, adapters, optimizers."""

"""The learner: FSDP2 training of the policy and the durable state of the run."""

"""A set of weights on its way from the learner to the engines: layout, segments, broadcasts."""

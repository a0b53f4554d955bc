"""Fully asynchronous reinforcement-learning post-training of language models, without Ray."""

"""Destinations of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, a Prometheus endpoint.

They live in an actor of their own, which asks the controller for what there is: the run neither waits nor ends for
them, and what they do not take in time is counted.
"""

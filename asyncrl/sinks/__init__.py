"""Destinations of metrics besides metrics.jsonl: TensorBoard, Weights & Biases, a Prometheus endpoint.

They live in a process of their own (``python -m asyncrl.sinks``), which the controller feeds through a bounded
queue: the run neither waits nor ends for them, and what they do not take in time is counted.
"""

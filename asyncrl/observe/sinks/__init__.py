"""Destinations of metrics: TensorBoard, Weights & Biases, a Prometheus endpoint.

Their actor asks the controller for metrics. Before it drains, the run waits for no sink; lines that a sink
misses are counted.
"""

"""Destinations of metrics: TensorBoard, Weights & Biases, a Prometheus endpoint.

Their actor asks the controller for metrics. The run never waits for a sink; lines that a sink misses are counted.
"""

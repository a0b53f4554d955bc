"""Benchmarks: what asyncrl costs above the floor, and what it saves against Ray."""

"""Inference engines behind one interface (asyncrl/rollouter/engines/base.py)."""

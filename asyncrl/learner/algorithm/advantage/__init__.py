"""Advantages of groups, the check of delivered groups, and metrics of groups."""

"""Losses and advantages side by side on the quickstart's task: ``python -m tools.compare losses``."""

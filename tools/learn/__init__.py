"""Two tasks that a small model learns in episodes of several turns: ``python -m tools.learn``."""

"""Language models that score: relative_judge, for groups, and rubric, for single trajectories."""

JUDGES = ("relative_judge", "rubric")
"""Names for reward.function."""

"""The plan of each step: made when it begins, or while the step before is trained."""

"""Break a run while it trains, in every way that a machine can, and audit its records.

``python -m tools.chaos`` draws faults from a seed (plan.py) and carries them out on a run (faults.py, world.py,
torment.py). audit.py compares the records of the run with the expected ones. ``python -m tools.chaos.updates`` strikes
in each phase of a weight update instead.
"""

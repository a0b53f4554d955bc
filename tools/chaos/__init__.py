"""Break a run while it trains, in every way that a machine can, and audit its records.

``python -m tools.chaos`` draws faults from a seed (plan.py) and carries them out on a run (faults.py, world.py,
hosts.py). audit.py compares the records of the run with the expected ones.
"""

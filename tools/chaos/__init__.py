"""Break a run while it trains, in every way that a machine can, and audit its records.

``python -m tools.chaos`` draws faults from a seed (plan.py), carries them out (faults.py, world.py) on a run (torment.py),
and compares the records of the run with the expected ones (audit.py).
"""

"""Break a run while it trains, in every way that a machine can, and audit what it has done.

``python -m tools.chaos`` draws faults from a seed (plan.py), carries them out (faults.py, world.py) on a run that is
followed to its end (torment.py), and holds what the run has written against what it should have (audit.py).
``python -m tools.chaos.updates`` strikes in each phase of a weight update instead.
"""

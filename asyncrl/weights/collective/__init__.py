"""Weights by broadcast: from the learner's rank 0 to all workers of all engines at once, over gloo or NCCL.

Rank 0 (sender.py) and the workers (receiver.py) meet once in an epoch (meeting.py) and keep a link each (links.py),
over which they agree on the next transfer (framing.py) and notice one another's end (waiting.py). A transport only has
to form a group and to move the bytes of a bucket: gloo.py; nccl.py with packing.py.
"""

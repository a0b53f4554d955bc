"""The meeting point of the ranks of one generation of the learner: the store of its rank 0.

Invariant: no rank goes to the store of another generation than its own, even if the controller knows others. Fails
with Refused where rank 0 is of a newer one already: then this rank is to be started again.
"""

from __future__ import annotations

from asyncrl.errors import Refused
from asyncrl.messages.actors import ActorRecord

RANK_0 = "learner/0"


def store_of(rank_0: ActorRecord, generation: int) -> tuple[str, int]:
    """Host and port of the store for a rank of this generation. Raises Refused.

    ``rank_0`` is of no older one, as it was asked for.
    """
    if rank_0.incarnation != generation:
        raise Refused(RANK_0, "incarnation", ours=str(generation), theirs=str(rank_0.incarnation))
    return rank_0.facts["store_host"], rank_0.facts["store_port"]

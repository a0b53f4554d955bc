"""The address at which learner ranks meet."""

import pytest

from asyncrl.core.errors import Refused
from asyncrl.learner.actor import RANK_0, store_of
from asyncrl.messages.actors import ActorRecord

RECORD = ActorRecord(name=RANK_0, incarnation=8, address="", facts={"store_host": "10.0.0.1", "store_port": 4711})


def test_a_rank_connects_only_to_the_store_of_its_own_generation():
    assert store_of(RECORD, 8) == ("10.0.0.1", 4711)
    with pytest.raises(Refused, match=r"learner/0 refuses .* incarnation \(ours 7, theirs 8\)") as caught:
        store_of(RECORD, 7)
    assert caught.value.restartable

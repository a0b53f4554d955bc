"""The messages: each survives the wire, and each request names its reply."""

import msgspec
import numpy as np
import pytest
from every_message import EVERY_MESSAGE
from made_group import make_group

from asyncrl.core.errors import ProtocolError
from asyncrl.core.roles import ROLES
from asyncrl.messages import Done, Message, Request, may_send, senders_of
from asyncrl.messages.actors import StopRun
from asyncrl.messages.groups import Deliver, Sequence, Turn, VersionSpan, fits, sealed
from asyncrl.rpc.wire.codec import Codec


def test_a_group_survives_the_wire():
    codec, group = Codec(), make_group()
    plain = group.trajectories[1].sequences[0]
    spans = [VersionSpan(-1, 0, 2, role="repeated"), VersionSpan(-1, 2, 3, role="context"), VersionSpan(4, 3, 5)]
    branch = Sequence(
        prompt_ids=np.arange(4, dtype=np.int32),
        tokens=np.arange(5, dtype=np.int32),
        logprobs=np.full(2, -0.5, np.float32),
        spans=spans,
        turns=[Turn(3, 5, 0.25)],
    )
    group.trajectories[0].sequences.append(branch)
    group.trajectories[0].messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": None}]
    body, *buffers = codec.encode(Deliver(group=group))
    assert len(buffers) == 1 + 2 * 2 + 3
    found = codec.decode(Deliver, body, buffers).group
    assert found.lease.row == group.lease.row
    again, [after] = found.trajectories[0], found.trajectories[1].sequences
    assert (after.spans, after.turns, after.prompt_ids) == (plain.spans, [], None)
    assert np.array_equal(after.logprobs, plain.logprobs)
    assert (again.sequences[1].spans, again.sequences[1].turns) == (branch.spans, branch.turns)
    assert again.sequences[1].prompt_ids.tolist() == [0, 1, 2, 3]
    assert again.messages == group.trajectories[0].messages
    # A trajectory without a sequence is refused.
    group.trajectories[0].sequences.clear()
    body, *buffers = codec.encode(Deliver(group=group))
    with pytest.raises(ProtocolError, match="sequences"):
        codec.decode(Deliver, body, buffers)


REQUESTS = [kind for kind in EVERY_MESSAGE.values() if issubclass(kind, Request)]
SENT = [kind for kind in EVERY_MESSAGE.values() if kind in REQUESTS or kind not in {one.reply for one in REQUESTS}]


def test_each_request_names_its_reply_and_each_sent_message_its_senders():
    assert all(issubclass(kind.reply, Message) and kind.__doc__ for kind in REQUESTS) and len(SENT) > 25
    everybody = {*ROLES, "agent", "launcher", "viewer"}
    assert [kind.__name__ for kind in SENT if not senders_of(kind) or not senders_of(kind) <= everybody] == []


def test_messages_of_one_role_cannot_be_sent_by_another():
    for role, own in (
        ("learner", {"Publish", "Outcomes", "Restored", "RunFinished", "CheckpointWritten", "MetricsLine"}),
        ("rollouter", {"Deliver", "RequestLeases", "Score", "RunEpisode", "NextUpdate"}),
        ("episodes", {"Chat", "TurnReward"}),
        ("dataloader", {"OpenLeases", "Holds"}),
        ("agent", {"ActorEnded", "HostLeft"}),
        ("launcher", {"Join", "Leave"}),
    ):
        assert {kind.__name__ for kind in SENT if senders_of(kind) == {role}} >= own
    assert senders_of(StopRun) == {"agent", "launcher"}


def test_replies_and_unlisted_messages_have_no_senders():
    with pytest.raises(LookupError, match="does not say who may send Done"):
        senders_of(Done)
    assert not any(may_send("", senders_of(kind)) for kind in SENT)


CHANGES = [{"uid": "0-2"}, {"number": 2}, {"purpose": "eval/x"}, {"seal": ""}, {"seal": "\u00e9"}]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_a_seal_fits_only_the_unchanged_lease_and_its_holder(changed):
    lease = sealed(b"key", make_group().lease, "rollouter/1", 7)
    assert fits(b"key", lease, "rollouter/1", 7)
    assert not fits(b"key", msgspec.structs.replace(lease, **changed), "rollouter/1", 7)
    for key, *other in ((b"other", "rollouter/1", 7), (b"key", "rollouter/11", 7), (b"key", "rollouter/1", 8)):
        assert not fits(key, lease, *other)

"""The messages: every one survives the wire, and each request says what answers it."""

import numpy as np
import pytest
from every_message import EVERY_MESSAGE

from asyncrl.errors import ProtocolError
from asyncrl.messages import Message, Request
from asyncrl.messages.groups import Group, Sequence, Ticket, Trajectory, Turn, VersionSpan
from asyncrl.messages.learner import Deliver, Delivered
from asyncrl.wire.codec import Codec


def make_group(uid="0-1", samples=2, tokens=3):
    ticket = Ticket(
        uid=uid,
        grant=1,
        purpose="train",
        epoch=0,
        index=1,
        param_version=4,
        prompt_ids=np.arange(5, dtype=np.int32),
        prompt="1+1=",
        row={"answer": "2", "nested": {"a": [1, None]}},
        samples=samples,
        temperature=1.0,
        max_tokens=8,
    )
    trajectories = [
        Trajectory(
            sample=sample,
            sequences=[
                Sequence(
                    tokens=np.arange(tokens, dtype=np.int32),
                    logprobs=np.full(tokens, -0.5, np.float32),
                    spans=[VersionSpan(4, 0, 1), VersionSpan(5, 1, tokens, True)],
                )
            ],
            finish_reason="stop",
            text="2",
            reward=1.0,
        )
        for sample in range(samples)
    ]
    return Group(ticket=ticket, trajectories=trajectories)


def test_a_group_survives_the_wire():
    codec, group = Codec(), make_group()
    body, *buffers = codec.encode(Deliver(group=group))
    assert len(buffers) == 1 + 2 * 2
    again = codec.decode(Deliver, body, buffers).group
    assert again.ticket.row == group.ticket.row
    [before], [after] = group.trajectories[1].sequences, again.trajectories[1].sequences
    assert (after.spans, after.turns, after.prompt_ids) == (before.spans, [], None)
    assert np.array_equal(after.logprobs, before.logprobs)


def test_a_conversation_survives_the_wire():
    codec, group = Codec(), make_group()
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
    again = codec.decode(Deliver, body, buffers).group.trajectories[0]
    assert (again.sequences[1].spans, again.sequences[1].turns) == (branch.spans, branch.turns)
    assert again.sequences[1].prompt_ids.tolist() == [0, 1, 2, 3]
    assert again.messages == group.trajectories[0].messages


def test_a_trajectory_without_a_sequence_is_refused():
    codec, group = Codec(), make_group()
    group.trajectories[0].sequences.clear()
    body, *buffers = codec.encode(Deliver(group=group))
    with pytest.raises(ProtocolError, match="sequences"):
        codec.decode(Deliver, body, buffers)


@pytest.mark.parametrize(
    "kind", [k for k in EVERY_MESSAGE.values() if issubclass(k, Request)], ids=lambda k: k.__name__
)
def test_each_request_names_its_reply(kind):
    assert issubclass(kind.reply, Message)
    assert kind.__doc__


def test_a_request_and_its_reply_go_together():
    assert len(EVERY_MESSAGE) > 25
    assert Deliver.reply is Delivered

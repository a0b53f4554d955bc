"""A group of trajectories as a rollouter delivers it."""

import numpy as np

from asyncrl.messages.groups import Group, Lease, Sequence, Trajectory, VersionSpan


def make_group(uid="0-1", samples=2, tokens=3):
    lease = Lease(
        uid=uid,
        number=1,
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
    trajectories = []
    for sample in range(samples):
        path = Sequence(
            tokens=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -0.5, np.float32),
            spans=[VersionSpan(4, 0, 1), VersionSpan(5, 1, tokens, True)],
        )
        trajectories.append(Trajectory(sample=sample, sequences=[path], finish_reason="stop", text="2", reward=1.0))
    return Group(lease=lease, trajectories=trajectories)

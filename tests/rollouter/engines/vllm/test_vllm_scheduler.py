"""Tokens in batches between vLLM's core and its front end."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from asyncrl.rollouter.engines.vllm.scheduler import OutputBatches, join


def output(request: str, token: int, *, end: bool = False, width: int = 1) -> EngineCoreOutput:
    """An output of one token; its log-prob is -token, its rank token + 1."""
    ids = np.array([[token] + [0] * (width - 1)])
    return EngineCoreOutput(
        # As vLLM makes it for one token; of ``width`` members.
        new_sampling_mask=SamplingMaskLists(ids[0]),
        request_id=request,
        new_token_ids=[token],
        finish_reason=FinishReason.STOP if end else None,
        new_logprobs=LogprobsLists(ids, -ids.astype(np.float32), np.array([token + 1])),
    )


INTERVALS = {"a": 1, "b": 3, "c": 8}
NAMES = st.sampled_from(sorted(INTERVALS))
TOKEN = st.tuples(st.just("token"), NAMES, st.booleans(), st.integers(1, 3))
STEPS = st.lists(st.one_of(TOKEN, st.tuples(st.just("drop"), NAMES), st.just(("release",))), max_size=60)


@given(STEPS)
def test_each_token_is_handed_over_once_and_in_order(steps):
    batches = OutputBatches()
    sampled: dict[str, list[int]] = {name: [] for name in INTERVALS}
    given_over: dict[str, list[int]] = {name: [] for name in INTERVALS}

    def receive(due):
        logprobs = due.new_logprobs
        assert logprobs.logprobs[:, 0].tolist() == [-float(token) for token in due.new_token_ids]
        assert logprobs.logprob_token_ids[:, 0].tolist() == due.new_token_ids
        assert logprobs.sampled_token_ranks.tolist() == [token + 1 for token in due.new_token_ids]
        assert [members[0] for members in due.new_sampling_mask.to_nested_list()] == due.new_token_ids
        given_over[due.request_id] += due.new_token_ids

    for number, (kind, *of) in enumerate(steps):
        if kind == "token":
            name, end, width = of
            sampled[name].append(number)
            due = batches.add(ord(name), INTERVALS[name], output(name, number, end=end, width=width))
            if due is not None:
                receive(due)
                assert due.finish_reason == (FinishReason.STOP if end else None)
            assert given_over[name] == sampled[name] or not end
        elif kind == "drop":
            batches.drop(of)
            del sampled[of[0]][len(given_over[of[0]]) :]
        else:
            for client, due in batches.release():
                assert chr(client) == due.request_id
                receive(due)
            assert given_over == sampled and not batches
        for name, interval in INTERVALS.items():
            there = len(given_over[name])
            assert sampled[name][:there] == given_over[name]
            assert len(sampled[name]) - there < interval


def test_masks_of_one_token_and_of_several_are_joined():
    """vLLM gives several tokens of a step to a request that decodes speculatively."""
    several = output("a", 2)
    several.new_token_ids = [2, 3]
    several.new_sampling_mask = SamplingMaskLists(np.array([2, 9, 3]), np.array([0, 2, 3]))
    joined = join([output("a", 1, width=2), several, output("a", 4)])
    assert joined.new_sampling_mask.to_nested_list() == [[1, 0], [2, 9], [3], [4]]
    assert join([several]).new_sampling_mask is several.new_sampling_mask
    without = [msgspec.structs.replace(output("a", token), new_sampling_mask=None) for token in (1, 2)]
    assert join(without).new_sampling_mask is None


def test_a_joined_output_says_how_it_began_and_how_it_ended():
    queued, preempted = map(EngineCoreEvent.new_event, (EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED))
    first, middle, last = output("a", 1), output("a", 2), output("a", 3, end=True)
    first.prefill_stats, first.events, middle.events, last.stop_reason = PrefillStats(), [queued], [preempted], 3
    joined = join([first, middle, last])
    assert (joined.new_token_ids, first.new_token_ids) == ([1, 2, 3], [1])
    assert joined.prefill_stats is first.prefill_stats
    assert joined.events == [queued, preempted]
    assert (joined.finish_reason, joined.stop_reason) == (FinishReason.STOP, 3)

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from draws import examples
from harness import replace
from hypothesis import given, settings
from hypothesis import strategies as st
from learner.learner_cases import (
    build_step,
    changed,
    context_of,
    make_config,
    make_group,
    make_sequence,
    make_trajectory,
    only,
    random_groups,
)

from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.batch import step_metrics
from asyncrl.messages.groups import Group, Trajectory, Turn, VersionSpan


def _two_rows():
    first = make_trajectory(
        [10, 11, 12],
        reward=1.0,
        logprobs=np.array([-0.1, -0.3], dtype=np.float32),
        spans=[VersionSpan(3, 0, 1), VersionSpan(-1, 1, 2, role="context"), VersionSpan(4, 2, 3, True)],
    )
    second = make_trajectory([20], reward=0.0, version=5)
    return make_group(0, [1, 2], [first, second])


def test_a_micro_batch_predicts_each_loss_token_from_the_position_before_it() -> None:
    plan = build_step([_two_rows()], version=5, config=make_config(advantage="dr_grpo"), world_size=1, packed=True)
    [[batch]] = only(plan).ranks
    assert batch.input_ids.tolist() == [1, 2, 10, 11, 1, 2]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.sequences.tolist() == [0, 1]
    assert batch.predict.tolist() == [1, 3, 5]
    assert batch.targets.tolist() == [10, 12, 20]
    assert batch.behaviour.tolist() == pytest.approx([-0.1, -0.3, -1.0])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert batch.staleness.tolist() == [2, -1, 0]
    assert only(plan).denominator == 3.0
    assert plan.temperature == 0.8
    assert plan.tokens == 6
    assert [(s.uid, s.sample) for s in plan.sequences] == [("0-0", 0), ("0-0", 1)]


def test_metrics_of_a_step() -> None:
    """Groups with a signal and without, and episodes of several turns."""
    spans = [VersionSpan(2, 0, 3), VersionSpan(4, 3, 4)]
    first = make_trajectory([1, 2, 3, 4], reward=1.0, spans=spans, resumes=1, components={"format": 0.5})
    second = make_trajectory([1, 2], version=4, finish_reason="turns", components={"format": 1.5})
    first = replace(first, turns=1, stage_s={"engine": 1.0, "tool": 2.0}, score_s=1.0)
    second = replace(second, turns=4, forks={"edited": 2, "cut": 1}, stage_s={"engine": 3.0, "user": 1.0})
    trained = make_group(0, [1], [first, second])
    zeros, best = (
        make_group(index, [1], [make_trajectory([1], reward=reward, version=4) for _ in range(2)])
        for index, reward in ((1, 0.0), (2, 1.0))
    )
    shares = {"engine": 4 / 8, "tool": 2 / 8, "user": 1 / 8, "score": 1 / 8}
    assert step_metrics([trained], [zeros, best], 4, make_config()) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": 0.5,
            "reward/trained_mean": 0.5,
            "reward/signal_fraction": 1 / 3,
            "reward/all_zero_fraction": 1 / 3,
            "reward/all_max_fraction": 1 / 3,
            "reward/component/format": 1.0,
            "rollout/length_mean": 10 / 6,
            "rollout/length_p95": np.percentile([4, 2, 1, 1, 1, 1], 95),
            "rollout/truncated_fraction": 1 / 6,
            "rollout/mixed_version_fraction": 1 / 6,
            "rollout/resumed_trajectories": 1.0,
            "rollout/turns_mean": 2.5,
            "rollout/turns_p95": np.percentile([1, 4], 95),
            "rollout/forks/edited": 2.0,
            "rollout/forks/cut": 1.0,
            **{f"rollout/episode_share/{state}": share for state, share in shares.items()},
            "staleness/token_mean": 6 / 6,
            "staleness/token_max": 2.0,
            # The first sampled token is 2 versions old and the limit is 1.
            "staleness/late_groups": 1.0,
            "staleness/late_fraction": 3 / 6,
        }
    )


def test_metrics_of_a_step_by_source() -> None:
    groups = [
        make_group(index, [1], [make_trajectory([1], reward=reward, version=4) for reward in rewards])
        for index, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
    ]
    named = [
        msgspec.structs.replace(group, lease=msgspec.structs.replace(group.lease, source=name))
        for group, name in zip(groups, ("a", "a", "b"), strict=True)
    ]
    found = step_metrics(named[:1], named[1:], 4, make_config())
    assert {key: value for key, value in found.items() if key.startswith(("source", "reward/signal"))} == {
        "source/a/reward_mean": 0.75,
        "source/b/reward_mean": 0.0,
        "source/a/signal_fraction": 0.5,
        "source/b/signal_fraction": 0.0,
        "reward/signal_fraction": pytest.approx(1 / 3),
    }
    # A signal that the rewards lack has no share.
    unknown = step_metrics(named, (), 4, changed(make_config(), learner={"signal": "format"}))
    assert "source/a/reward_mean" in unknown and not any(key.endswith("signal_fraction") for key in unknown)


def test_late_tokens_that_are_left_out_are_counted_and_their_reward_stays() -> None:
    # Repeated tokens are never late.
    mixed = make_trajectory([8, 1, 2, 3], roles="rsss", reward=1.0, version=[0, 1, 2, 3])
    group = make_group(0, [9], [mixed, make_trajectory([4, 5], version=0)])
    config = changed(make_config(advantage="dr_grpo"), staleness={"max": 1, "late": "mask"})
    plan = build_step([group], version=3, config=config, world_size=1, packed=True)
    [[batch]] = only(plan).ranks
    assert (batch.input_ids.tolist(), batch.advantages.tolist()) == ([9, 8, 1, 2], [0.5, 0.5])
    names = ("late_groups", "late_fraction", "masked_tokens", "token_mean", "token_max")
    masked, trained = (step_metrics([group], (), 3, c) for c in (config, make_config()))
    assert [masked[f"staleness/{name}"] for name in names] == pytest.approx([1.0, 3 / 5, 3.0, 0.5, 1.0])
    assert "staleness/masked_tokens" not in trained
    assert (trained["staleness/late_fraction"], trained["staleness/token_max"]) == (pytest.approx(3 / 5), 3.0)
    fresh = make_group(0, [1], [make_trajectory([1, 2], roles="rs", version=[0, 3]), make_trajectory([1], version=3)])
    assert step_metrics([fresh], (), 3, make_config())["staleness/late_groups"] == 0.0


# --- sequences ---


def test_a_token_without_a_loss_is_not_computed() -> None:
    """A sequence without a sampled token, tokens after the last sampled one, and a trajectory without any."""
    main, aside = make_sequence([10, 11, 12], roles="scc"), make_sequence([10, 40], roles="rr")
    whole = make_trajectory(sequences=[main, aside], reward=1.0)
    group = make_group(0, [1], [whole, make_trajectory([50], roles="r")])
    plan = build_step([group], version=0, config=make_config(advantage="dr_grpo"), world_size=1, packed=True)
    [[batch]] = only(plan).ranks
    assert (batch.input_ids.tolist(), batch.targets.tolist(), plan.tokens) == ([1], [10], 1)


@st.composite
def _conversations(draw: st.DrawFn, prompt: list[int]) -> tuple[Trajectory, list[dict[str, Any]]]:
    """A trajectory made of a random forest of answers, and the forest: for each answer what it is trained on."""
    ids = st.lists(st.integers(0, 9), min_size=1, max_size=3)
    nodes: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 5))):
        parent = draw(st.integers(-1, number - 1))
        tokens = draw(ids)
        nodes.append(
            {
                "parent": parent,
                "context": draw(ids) if parent < 0 else draw(st.just([]) | ids),
                "tokens": tokens,
                "logprobs": [-draw(st.integers(0, 64)) / 16 for _ in tokens],
                "versions": sorted(draw(st.integers(0, 4)) for _ in tokens),
                "past": draw(st.sampled_from([0.0, 0.0, 0.5, -1.25])),
                "trained": draw(st.integers(0, 5)) > 0,
            }
        )
    if draw(st.booleans()):
        nodes[0]["context"] = prompt
    parents = {node["parent"] for node in nodes}
    sequences, seen = [], set()
    for leaf in (number for number in range(len(nodes)) if number not in parents):
        path = [leaf]
        while nodes[path[0]]["parent"] >= 0:
            path.insert(0, nodes[path[0]]["parent"])
        first = nodes[path[0]]["context"]
        tokens, roles, versions, logprobs, turns = [], "", [], [], []
        for number in path:
            node = nodes[number]
            if number != path[0]:
                tokens += node["context"]
                roles += "c" * len(node["context"])
                versions += [-1] * len(node["context"])
            new = node["trained"] and number not in seen
            if new:
                turns.append(Turn(len(tokens), len(tokens) + len(node["tokens"]), node["past"]))
                logprobs += node["logprobs"]
                node["before"] = (*first, *tokens)
            tokens += node["tokens"]
            roles += ("s" if new else "r") * len(node["tokens"])
            versions += node["versions"]
        seen |= set(path)
        sequences.append(
            make_sequence(
                tokens,
                roles=roles,
                versions=versions,
                logprobs=np.array(logprobs, np.float32),
                prompt_ids=None if first is prompt else np.array(first, np.int32),
                turns=turns if len(turns) != 1 or turns[0].past_reward else [],
            )
        )
    reward = draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))
    finish = draw(st.sampled_from(["stop", "stop", "length", "turns", "time"]))
    trajectory = make_trajectory(sequences=sequences, reward=reward, finish_reason=finish)
    return trajectory, [node for node in nodes if node["trained"]]


def _brute_force(group: Group, answers: list[list[dict[str, Any]]], config: Any, version: int) -> list[tuple]:
    """(context, target, behaviour, staleness, advantage, weight) of each token that is to be trained."""
    rewards = [float(t.reward or 0.0) for t in group.trajectories]
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    squares = [
        sum((r - node["past"] - mean) ** 2 for node in nodes) / len(nodes)
        for r, nodes in zip(rewards, answers, strict=True)
        if nodes
    ]
    if any(node["past"] for nodes in answers for node in nodes):
        spread = max(spread, math.sqrt(sum(squares) / (len(rewards) - 1)))
    found = []
    for trajectory, nodes in zip(group.trajectories, answers, strict=True):
        if config.reward.truncated == "mask" and trajectory.finish_reason != "stop":
            continue
        own = []
        for node in nodes:
            value = float(trajectory.reward or 0.0) - node["past"] - mean
            if config.learner.advantage == "grpo":
                value /= spread + 1e-6
            elif config.learner.advantage == "rloo":
                others = (sum(rewards) - float(trajectory.reward or 0.0)) / (len(rewards) - 1)
                value = float(trajectory.reward or 0.0) - node["past"] - others
            for i, target in enumerate(node["tokens"]):
                stale = version - node["versions"][i]
                if config.staleness.late == "train" or stale <= config.staleness.max:
                    own.append(((*node["before"], *node["tokens"][:i]), target, node["logprobs"][i], stale, value))
        weight = 1 / len(own) if own and config.learner.aggregation == "sequence" else 1.0
        found += [(*row, weight) for row in own]
    return found


def _computed(plan: Any) -> Iterator[tuple]:
    for batch in (batch for update in plan.updates for rank in update.ranks for batch in rank):
        for i, position in enumerate(batch.predict.tolist()):
            if batch.sequences[batch.segments[i]] < 0:
                assert batch.weights[i] == 0
                continue
            rest = (batch.targets, batch.behaviour, batch.staleness, batch.advantages, batch.weights)
            yield (tuple(context_of(batch, position)), *(column[i].item() for column in rest))


@given(
    data=st.data(),
    advantage=st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
    truncated=st.sampled_from(["score", "mask"]),
    late=st.sampled_from(["train", "mask"]),
    packed=st.booleans(),
    shared=st.booleans(),
    world_size=st.integers(1, 3),
    budget=st.sampled_from([1, 12, 200]),
)
@settings(max_examples=examples(100), deadline=None)
def test_a_step_trains_the_same_tokens_as_a_loop_over_the_answers(
    data, advantage, aggregation, truncated, late, packed, shared, world_size, budget
) -> None:
    """Each answer once, in its own context, with its own advantage, however many sequences repeat it."""
    prompt = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    made = [data.draw(_conversations(prompt)) for _ in range(data.draw(st.integers(2, 3)))]
    group = make_group(0, prompt, [trajectory for trajectory, _ in made])
    config = make_config(advantage=advantage, aggregation=aggregation, truncated=truncated, budget=budget)
    config = changed(config, staleness={"max": 2, "late": late})
    plan = build_step([group], version=4, config=config, world_size=world_size, packed=packed, shared=shared)
    expected = sorted(_brute_force(group, [answers for _, answers in made], config, 4))
    found = sorted(_computed(plan))
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    np.testing.assert_allclose([row[4:] for row in found], [row[4:] for row in expected], rtol=1e-5, atol=1e-6)
    units = {sequence.sample for sequence in plan.sequences}
    denominators = {"token": len(expected), "sequence": len(units), "constant": 32 * len(units)}
    assert [update.denominator for update in plan.updates] == ([denominators[aggregation]] if expected else [])


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 2))
@settings(max_examples=examples(25), deadline=None)
def test_updates_share_the_groups_and_the_baseline_of_the_step(seed, updates, world_size) -> None:
    """Each token is in one update, with the advantage that it has in a step of a single update."""
    groups = random_groups(seed, 4)
    config = make_config(advantage="reinforce")
    several = changed(config, learner={"updates_per_batch": updates})
    whole, plan = (
        build_step(groups, version=2, config=c, world_size=world_size, packed=True) for c in (config, several)
    )
    assert sorted(_computed(plan)) == sorted(_computed(whole))
    assert sum(update.denominator for update in plan.updates) == only(whole).denominator
    assert plan.sequences == only(whole).sequences
    assert plan.tokens == whole.tokens
    uids = [update.uids for update in plan.updates]
    assert len({uid for each in uids for uid in each}) == sum(map(len, uids))


@given(
    seed=st.integers(0, 2**32 - 1),
    flat=st.sets(st.integers(0, 3)),
    updates=st.integers(1, 3),
    world_size=st.integers(1, 2),
    packed=st.booleans(),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
)
@settings(max_examples=examples(25), deadline=None)
def test_sequences_of_advantage_0_are_left_out_and_change_nothing_else(
    seed, flat, updates, world_size, packed, aggregation
) -> None:
    groups = [
        replace(group, trajectories=[replace(t, reward=1.0) for t in group.trajectories]) if i in flat else group
        for i, group in enumerate(random_groups(seed, 4))
    ]
    config = make_config(aggregation=aggregation, updates_per_batch=updates)
    whole, plan = (
        build_step(groups, version=2, config=config, world_size=world_size, packed=packed, skip_zero_advantages=skip)
        for skip in (False, True)
    )
    assert len(plan.updates) == len(whole.updates)
    for ours, theirs in zip(plan.updates, whole.updates, strict=True):
        assert (ours.denominator, ours.sequences, ours.uids) == (theirs.denominator, theirs.sequences, theirs.uids)
        computed = {
            i: int(length)
            for rank in ours.ranks
            for batch in rank
            for i, length in zip(batch.sequences.tolist(), batch.lengths, strict=True)
            if i >= 0
        }
        with_signal = {i for i, s in enumerate(ours.sequences) if int(s.uid.split("-")[1]) not in flat}
        assert set(computed) == (with_signal or set(range(len(ours.sequences))))
        assert ours.tokens == sum(computed.values())
    assert {row for row in _computed(plan) if row[4]} == {row for row in _computed(whole) if row[4]}


@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.booleans(), st.sampled_from(["train", "mask"]))
@settings(max_examples=examples(25), deadline=None)
def test_each_target_keeps_the_set_that_it_was_sampled_from(seed, world_size, shared, late) -> None:
    """Tokens are known by their log-probs, of which no two are equal. Versions make some tokens late."""
    groups = random_groups(seed, 3, truncated=True)
    sets: dict[float, list[int]] = {}
    for sequence in (s for group in groups for trajectory in group.trajectories for s in trajectory.sequences):
        members = np.split(sequence.sets.ids, np.cumsum(sequence.sets.sizes)[:-1])
        sets |= dict(zip(sequence.logprobs.tolist(), map(np.ndarray.tolist, members), strict=True))
        sequence.spans = [replace(s, version=s.start % 3) if s.version >= 0 else s for s in sequence.spans]
    config = changed(make_config(), staleness={"max": 1, "late": late})
    plan = build_step(groups, version=2, config=config, world_size=world_size, packed=True, shared=shared)
    found = 0
    for batch in (batch for update in plan.updates for rank in update.ranks for batch in rank):
        assert len(batch.set_sizes) == len(batch.predict)
        members = np.split(batch.set_ids, np.cumsum(batch.set_sizes)[:-1])
        for i, segment in enumerate(batch.segments):
            is_filler = batch.sequences[segment] < 0
            assert members[i].tolist() == ([] if is_filler else sets[batch.behaviour[i].item()])
            found += not is_filler
    assert found == len(sets) if late == "train" else found < len(sets)


def test_a_users_advantage_that_fails_is_named() -> None:
    config = make_config(advantage="losses_of_a_user:odd_advantage")
    with pytest.raises(ConfigError, match=r"learner\.advantage: losses_of_a_user:odd_advantage failed: KeyError"):
        build_step([_two_rows()], version=5, config=config, world_size=1, packed=True)

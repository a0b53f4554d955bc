"""The learner's accounts: buffer, reports, evaluations, generation and updates of the engines."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner.learner_cases import make_sequence
from made_group import make_group
from msgspec.structs import replace

from asyncrl.learner.groups.dataloader_link import OutcomeQueue
from asyncrl.learner.groups.evals import EvalCollector, eval_metrics
from asyncrl.learner.groups.intake import GroupBuffer
from asyncrl.learner.metrics import generation_log
from asyncrl.learner.metrics.generation_log import GenerationLog, Tokens, merge, update_line, update_metrics
from asyncrl.messages.dataloader import Outcome
from asyncrl.messages.groups import Group
from asyncrl.messages.learner import RolloutStats, UpdateTimes
from asyncrl.observe.catalogue import find
from asyncrl.observe.evaluations import estimate_pass_at, pass_at_ks


@given(st.permutations(range(8)))
def test_a_step_takes_the_oldest_leases_in_the_order_of_the_data_not_of_arrival(arrival):
    buffer, made = GroupBuffer(), [make_group(f"0-{10 - i}") for i in range(8)]
    for i in arrival:
        group, version = made[i], (0, 0, 0, 1, 1, 1, 2, 2)[i]
        buffer.add(replace(group, lease=replace(group.lease, param_version=version, epoch=0, index=10 - i)))
    assert [g.lease.index for g in buffer.take(buffer.oldest(4))] == [5, 8, 9, 10]
    assert [g.lease.index for g in buffer.take(buffer.oldest(4))] == [3, 4, 6, 7]
    assert len(buffer) == 0


def test_reports_are_numbered_and_carry_each_outcome_once():
    queue = OutcomeQueue()
    assert queue.next_report() is None
    queue.published(0, 0)
    first = queue.next_report()
    assert (first.number, first.version, first.step_began) == (1, 0, False)
    queue.outcome(Outcome("0-1", "trained"))
    queue.step_began(7, waited=True)
    second = queue.next_report()
    assert (second.number, second.outcomes) == (2, [Outcome("0-1", "trained")])
    assert (second.buffered_groups, second.waited, second.step_began) == (7, True, True)
    queue.published(1, 8)
    queue.finished()
    third = queue.next_report()
    assert (third.outcomes, third.trained_at_version, third.finished, third.step_began) == ([], 8, True, False)
    assert queue.next_report() is None


def test_an_eval_round_is_complete_once_with_each_group_counted_once():
    collector = EvalCollector()
    groups = [make_group(f"held@0-{i}") for i in range(3)]
    assert collector.add(groups[0])
    assert not collector.add(groups[0])
    collector.opened({"eval/held@0": 3})
    assert collector.complete() == []
    assert all(collector.add(group) for group in groups[1:])
    ((round, members),) = collector.complete()
    assert (round, len(members)) == ("held@0", 3)
    collector.opened({"eval/held@0": 3})
    assert collector.complete() == []
    assert not collector.add(groups[1])


def test_eval_figures_label_the_versions_served_and_count_failures_apart():
    good, bad = make_group("held@0-0"), make_group("held@0-1")
    good.trajectories[0].reward = 0.0
    failed = Group(lease=bad.lease, trajectories=[], failure="crashed")
    names = ("mean", "pass_at_k", "failed", "version_min", "length_mean", "truncated_fraction")
    figures = eval_metrics("held", [good, failed])
    assert [figures[f"eval/held/{name}"] for name in names] == [0.5, 1.0, 1, 4, 3.0, 0.0]
    assert figures["weights/version"] == 5
    first, second = good.trajectories
    first.finish_reason, second.finish_reason = "turns", "time"
    first.sequences.append(make_sequence([1, 2, 3, 4], roles="rcss", versions=9))
    figures = eval_metrics("held", [good])
    # Tokens that were not sampled have no version.
    assert [figures[f"eval/held/{name}"] for name in names] == [0.5, 1.0, 0, 4, 4.0, 1.0]
    assert figures["weights/version"] == 9
    nothing = eval_metrics("held", [failed])
    assert not {"eval/held/mean", "weights/version", "eval/held/version_min"} & nothing.keys()


def test_eval_metrics_have_components_pass_at_k_and_lengths():
    first, second = make_group("held@0-0", samples=4), make_group("held@0-1", samples=4)
    for group, rewards in ((first, (0.4, 0.6, 0.0, 0.0)), (second, (0.0, 0.1, 0.2, 0.3))):
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            trajectory.reward, trajectory.components = reward, {"right": reward, "mean": 2 * reward}
    del second.trajectories[3].components["right"]
    second.trajectories[3].sequences.append(make_sequence(list(range(40))))
    metrics = eval_metrics("held", [first, second], pass_at=0.4)
    # Two of four samples of the first prompt pass: C(2, 2) / C(4, 2) = 1/6 of all pairs have none that does.
    assert {key: value for key, value in metrics.items() if "/pass_at" in key or "/k" in key} == {
        "eval/held/pass_at/1": 0.25,
        "eval/held/pass_at/2": pytest.approx(5 / 12),
        "eval/held/pass_at/4": 0.5,
        "eval/held/pass_at_k": 0.5,
        "eval/held/k": 4,
    }
    assert metrics["eval/held/component/right"] == pytest.approx(1.3 / 7)
    assert metrics["eval/held/component/mean"] == pytest.approx(0.4)
    assert metrics["eval/held/length_p95"] > metrics["eval/held/length_mean"] == 3.0 + 40 / 8
    assert eval_metrics("held", [first, second])["eval/held/pass_at_k"] == 0.0
    assert all((found := find(key)) is not None and found.text for key in metrics)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_sample_that_passes(case):
    samples, passed, k = case
    choices = list(combinations(range(samples), k))
    expected = sum(min(choice) < passed for choice in choices) / len(choices)
    assert estimate_pass_at(k, samples, passed) == pytest.approx(expected)


def test_pass_at_1_and_n_are_among_those_reported():
    assert [pass_at_ks(n) for n in (1, 2, 8, 10)] == [[1], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8, 10]]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=15), st.integers(0, 40), st.integers(1, 30))
def test_overlap_is_the_covered_share_of_the_training_time(intervals, start, length):
    log = GenerationLog()
    pairs = [(float(a), float(a + size)) for a, size in intervals]
    log.add("rollouter/0", 1, RolloutStats(sampled_tokens=5, sampling=pairs), 1.0)
    covered = {t for a, b in pairs for t in range(int(a), int(b))}
    expected = len(covered & set(range(start, start + length))) / length
    assert log.overlap(float(start), float(start + length)) == pytest.approx(expected)
    merged = merge(pairs)
    assert all(first[1] < second[0] for first, second in zip(merged, merged[1:], strict=False))


def add_reports(log, name, *reports, incarnation=1):
    """Reports of (when, tokens sampled so far)."""
    for now, tokens in reports:
        log.add(name, incarnation, RolloutStats(sampled_tokens=tokens, sampling=[(now - 0.5, now)]), now)


def test_an_idle_rollouter_is_not_waited_for_and_its_time_counts_as_known():
    log = GenerationLog()
    log.add("rollouter/0", 1, RolloutStats(sampled_tokens=100, sampling=[]), 1.0)
    assert not log.covers(1.5, now=2.0, patience_s=3.0)
    log.add("rollouter/0", 1, RolloutStats(sampled_tokens=100, sampling=[], idle=True), 2.0)
    assert log.covers(9.0, now=9.0, patience_s=60.0)
    assert log.take_tokens(5.0, 9.0) == Tokens(sampled=0, reprefill=0)
    log.add("rollouter/0", 1, RolloutStats(sampled_tokens=100, sampling=[]), 10.0)
    assert not log.covers(10.5, now=11.0, patience_s=3.0)


def test_tokens_and_updates_are_counted_over_restarts_of_a_rollouter():
    log, update = GenerationLog(), UpdateTimes(version=1, stall_s=0.5)
    assert log.take_tokens(0.0, 1.0) is None
    log.add("rollouter/0", 1, RolloutStats(sampled_tokens=100, sampling=[], updates=[update]), 1.0)
    log.add("rollouter/0", 1, RolloutStats(sampled_tokens=150, sampling=[], reprefill_tokens=7), 2.0)
    log.add("rollouter/0", 2, RolloutStats(sampled_tokens=30, sampling=[], reprefill_tokens=2), 3.0)
    assert [log.covers(3.0, now=4.0, patience_s=3.0), log.covers(3.1, now=4.0, patience_s=3.0)] == [True, False]
    assert log.covers(3.1, now=6.1, patience_s=3.0)
    assert log.take_tokens(0.0, 3.0) == Tokens(sampled=180, reprefill=9)
    assert (log.take_updates(), log.take_updates()) == ([("rollouter/0", update)], [])
    add_reports(log, "rollouter/0", (4.0, 30), incarnation=2)
    assert log.take_tokens(3.0, 4.0).sampled == 0, "nothing was sampled, which is known"
    assert log.take_tokens(4.0, 5.0) is None


def test_steps_between_two_reports_have_the_rate_of_that_time():
    """Lines are written once the second report is there: no step is said to have sampled nothing."""
    log = GenerationLog()
    add_reports(log, "rollouter/0", (10.0, 0), (11.0, 1000))
    add_reports(log, "rollouter/1", (10.5, 0), (11.5, 500))
    taken = [log.take_tokens(start, start + 0.25).sampled for start in (10.0, 10.25, 10.5, 10.75)]
    assert taken == [250, 250, 375, 375]


@pytest.mark.parametrize(("succeeds", "tokens"), [(False, 5000), (True, 250)])
def test_the_first_step_of_a_restarted_learner_excludes_earlier_work_of_rollouters(succeeds, tokens):
    log = GenerationLog(succeeds=succeeds)
    add_reports(log, "rollouter/0", (10.0, 4750), (10.5, 5000))
    assert log.take_tokens(9.0, 10.5).sampled == tokens
    # That of one that is known begins in this learner's time.
    add_reports(log, "rollouter/0", (11.0, 70), incarnation=2)
    assert log.take_tokens(10.5, 11.0).sampled == 70


def test_a_long_step_of_many_rollouters_keeps_few_reports(monkeypatch):
    """Half a second between two reports of a thousand rollouters would be a million reports in ten minutes."""
    monkeypatch.setattr(generation_log, "MOST_HELD", 64)
    log = GenerationLog()
    for beat in range(1, 2001):
        for name in range(8):
            add_reports(log, f"rollouter/{name}", (beat / 2, 100 * beat))
    assert len(log._reports) <= 64 and len(log._intervals) <= 64
    assert log.take_tokens(0.0, 1000.0).sampled == 8 * 2000 * 100
    assert log.overlap(0.0, 1000.0) == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 2.0), st.integers(0, 500)), min_size=1, max_size=12),
    st.lists(st.floats(0.0, 30.0), max_size=12),
)
def test_each_token_counts_in_one_step(reports, ends):
    log, now, tokens = GenerationLog(), 0.5, 0
    for seconds, more in reports:
        now, tokens = now + seconds, tokens + more
        add_reports(log, "rollouter/0", (now, tokens))
    ends = [0.0, *sorted({end for end in ends if end < now}), now]
    taken = [log.take_tokens(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    found = [each.sampled for each in taken if each is not None]
    assert sum(found) == pytest.approx(tokens, abs=len(found))


def test_a_step_has_the_means_of_its_updates_and_the_sums_of_their_costs():
    times = {"stage_s": 1.0, "pause_s": 0.25, "load_s": 0.5, "resume_s": 0.125, "stall_s": 0.75}
    reported = {"version": 3, "transport": "shm", "bytes": 1000}
    measured = {"drift": 0.03, "drift_worst": 0.4, "probe_kl": 0.02}
    first = UpdateTimes(**times, **reported, **measured)
    second = UpdateTimes(version=4, transport="gloo", load_s=1.5, stall_s=2.0, bytes=1000)
    costs = {"updates": 2, "stall_s": 2.75, "bytes": 2000, "encoded_bytes": 2000}
    means = {"stage_s": 0.5, "pause_s": 0.125, "load_s": 1.0, "resume_s": 0.0625}
    # Over those that were measured.
    policy = {f"policy/{name}": value for name, value in measured.items()}
    assert update_metrics([first, second]) == {f"weights/{k}": v for k, v in (costs | means).items()} | policy
    assert update_metrics([]) == {f"weights/{name}": 0 for name in costs}
    weights = {f"weights/{name}": value for name, value in (times | reported | {"encoded_bytes": 1000}).items()}
    assert update_line("rollouter/1", first) == {"kind": "update", "replica": "rollouter/1"} | weights | policy
    assert not [key for key in update_line("rollouter/1", second) if key.startswith("policy/")]

"""A whole run in a process: its timeline, in which generation and training overlap, and the history of a group that was
aborted and resumed twice, compared with its samples.
"""

import itertools
import json

import pytest
from inprocess import System, until
from run_files import groups
from run_settings import sim_config
from trace_files import generation, load, slots

from asyncrl.core.errors import UsageError
from asyncrl.messages.monitor import RequestTrace, TraceWritten
from asyncrl.observe import logging
from asyncrl.observe.explain.history import explain, read_history
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.wire.keys import VIEWER

STEPS = 8
TABLES = {
    "run": {"samples_per_step": 1000},
    "rollout": {
        "replicas": 2,
        "concurrency": 8,
        "max_tokens": 400,
        "sim": {"length_median": 200.0, "length_sigma": 0.3, "decode_step_s": 0.002},
        "on_update": "abort_resume",
    },
    "learner": {"steps": STEPS, "groups_per_step": 2, "sim": {"step_s": 0.15}},
    "staleness": {"max": 4},
    "data": {"size": 256},
}


@pytest.fixture
def logs(monkeypatch, tmp_path):
    """Histories go to the logs, as those of real actors do."""
    folder = tmp_path / "run" / "logs" / "attempt_1"

    def write(line):
        folder.mkdir(parents=True, exist_ok=True)
        name = json.loads(line)["actor"].replace("/", "-")
        with (folder / f"{name}.log").open("a") as file:
            file.write(line + "\n")

    monkeypatch.setattr(logging, "writes", lambda _level: True)
    monkeypatch.setattr(logging, "write_line", write)
    return folder


def live(tmp_path, during=None, **tables):
    """A run, and ``during(system)`` at the same time."""
    system = System(sim_config(**(TABLES | tables)), tmp_path / "run")
    assert system.play(None if during is None else lambda: during(system)).phase == "done"
    return system


def texts_of(happenings, sample, *kinds):
    return [(h.what, h.facts["details"]) for h in happenings if h.sample == sample and h.what in kinds]


def test_generation_and_training_overlap_and_every_actor_and_every_slot_has_a_track(tmp_path, logs):
    # Steps so slow that every version reaches an engine before the next one, on a busy machine too, and that a
    # checkpoint is written before the next one is due.
    system = live(
        tmp_path,
        checkpoint={"every_versions": 3},
        rollout=TABLES["rollout"] | {"replicas": 1},
        learner=TABLES["learner"] | {"sim": {"step_s": 0.5}},
    )
    trace = load(system.run_dir / "trace" / "trace-001.json")
    assert set(trace) == set(system.config.actors)
    assert all(trace[actor]["state"] for actor in trace)
    training = [span for span in trace["learner/0"]["steps"] if span.name == "train"]
    assert [span.facts["step"] for span in training] == list(range(1, STEPS + 1))
    overlap = {
        version: sum(
            one.overlap(other)
            for one in generation(trace)
            if one.facts["version"] == version
            for other in training
            if other.facts["sampled_oldest"] <= version - 1 <= other.facts["sampled_newest"]
        )
        for version in range(2, STEPS)
    }
    assert sum(overlap.values()) > 100_000, overlap
    assert sum(microseconds > 0 for microseconds in overlap.values()) > STEPS / 2, overlap
    # The tokens of a step were sampled before it started.
    assert all(span.facts["sampled_newest"] <= span.facts["version"] for span in training)
    rollouter = trace["rollouter/0"]
    assert {track for track in rollouter if track.startswith("slot ")} == {f"slot {n}" for n in range(8)}
    updates = {span.name.rpartition(" ")[0] for span in rollouter["weights"]}
    assert updates >= {"stage", "wait for pause", "pause", "load", "resume"}
    loads = [span for span in rollouter["weights"] if span.name.startswith("load")]
    loaded = [span.facts["version"] for span in loads]
    assert loaded == sorted(loaded) and len(loaded) > 3
    submissions = [span for span in slots(rollouter) if span.name.startswith("generate")]
    assert not any(load.began < span.began < load.end for load in loads for span in submissions), "I4"
    phases = [span.name.partition(" ")[0] for span in trace["learner/0"]["steps"]]
    assert set(phases) == {"publish", "copy", "wait", "pack", "train"}
    assert [span.facts["step"] for span in trace["learner/0"]["checkpoint"]] == [3, 6, 8]
    scored = [span.facts["uid"] for span in trace["reward/0"]["worker 0"] if span.name == "score"]
    ended = [span for span in generation(trace) if span.facts.get("ended") in ("stop", "length")]
    assert len(scored) >= len(ended) > STEPS


def test_a_trace_on_demand_shows_that_moment_and_the_run_continues(tmp_path, logs):
    traces, asked = [], 0

    def running():
        """Responses that were in generation at the last trace."""
        rollouters = [traces[-1][name] for name in ("rollouter/0", "rollouter/1")]
        return [span for actor in rollouters for span in slots(actor) if span.end is None]

    async def ask(system):
        nonlocal asked
        learner = await system.at_step(3)
        # Both may wait for prompts at one moment.
        while not (traces and running()) and learner.step < STEPS:
            asked += 1
            written = await system.actors[CONTROLLER].traces.write(RequestTrace(), system.caller(VIEWER))
            assert isinstance(written, TraceWritten) and not written.error and not written.missing
            assert written.path == str(system.run_dir / "trace" / f"trace-{asked:03}.json")
            assert set(written.actors) == set(system.config.actors)
            traces.append(load(system.run_dir / "trace" / f"trace-{asked:03}.json"))

    system = live(tmp_path, ask)
    assert all(set(trace) == set(system.config.actors) for trace in traces)
    assert running(), "a span that continues is shown as such"
    last = load(system.run_dir / "trace" / f"trace-{asked + 1:03}.json")
    assert max(span.facts["step"] for span in last["learner/0"]["steps"] if span.name == "train") == STEPS


def test_the_log_of_a_group_that_was_resumed_twice_matches_its_samples(tmp_path, logs):
    system = live(tmp_path)
    twice = [group for group in groups(system.run_dir) if any(t["resumes"] == 2 for t in group["trajectories"])]
    assert twice, "updates met no response three times"
    for group in twice:
        story = read_history(system.run_dir, group["uid"])
        for trajectory in group["trajectories"]:
            sample, [sequence] = trajectory["sample"], trajectory["sequences"]
            spans, tokens_of_all = [span[:3] for span in sequence["spans"]], len(sequence["tokens"])
            submissions = texts_of(story, sample, "began", "resumed")
            assert [what for what, _ in submissions] == ["began"] + ["resumed"] * trajectory["resumes"]
            aborted = [tokens for _, (tokens,) in texts_of(story, sample, "aborted")]
            assert len(aborted) == trajectory["resumes"]
            # Each submission sampled the tokens between two aborts, under the version it started with.
            ends = [*aborted, tokens_of_all]
            by_submission = [
                [version, start, end]
                for (_, (version,)), (start, end) in zip(submissions, itertools.pairwise([0, *ends]), strict=True)
                if end > start
            ]
            assert _merged(by_submission) == spans
            ((_, finished),) = texts_of(story, sample, "finished")
            assert finished == [tokens_of_all, trajectory["finish_reason"], spans]
            ((_, (reward, _)),) = texts_of(story, sample, "scored")
            assert reward == trajectory["reward"]
        whole = [h for h in story if h.sample < 0]
        assert [h.what for h in whole] == ["leased", "buffered", "delivered", "trained"]
        assert whole[0].facts["version"] == group["leased_version"]
        assert (whole[-1].facts["step"], whole[-1].actor) == (group["step"], "learner/0")
        assert [h.wall for h in story] == sorted(h.wall for h in story)
        text = explain(system.run_dir, group["uid"])
        assert text.startswith(f"prompt group {group['uid']}: trained at step {group['step']}, on the weights of ver")


def _merged(spans):
    merged = []
    for version, start, end in spans:
        if merged and merged[-1][0] == version:
            merged[-1][2] = end
        else:
            merged.append([version, start, end])
    return merged


def test_the_log_of_a_group_continues_with_another_rollouter_when_the_first_dies(tmp_path, logs):
    async def kill(system):
        await system.at_step(2)
        await until(lambda: system.actors["rollouter/1"].metrics()["rollout/held"])
        await system.replace("rollouter/1")

    system = live(tmp_path, kill)
    again = []
    for group in groups(system.run_dir):
        story = read_history(system.run_dir, group["uid"])
        if any(h.what == "orphaned" for h in story):
            again.append([h.what for h in story if h.sample < 0])
            assert "its holder rollouter/1 has died" in explain(system.run_dir, group["uid"])
    assert again
    for whats in again:
        assert [w for w in whats if w not in ("given up", "delivered")] in (
            ["leased", "orphaned", "to be leased again", "leased", "buffered", "trained"],
            ["leased", "buffered", "orphaned", "settled", "trained"],
            ["leased", "orphaned", "settled", "buffered", "trained"],
        )


def test_a_run_without_a_window_writes_no_timeline_and_an_unknown_group_is_explained(tmp_path, logs):
    system = live(tmp_path, trace={"window_s": 0.0}, learner=TABLES["learner"] | {"steps": 2})
    assert not (system.run_dir / "trace").exists()
    with pytest.raises(UsageError, match=r"0-99999.*not leased.*The first that was is 0-"):
        explain(system.run_dir, "0-99999")

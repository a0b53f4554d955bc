"""Every real actor in one process, simulated engines and learner: the loop as a whole."""

import json
import threading
from collections import Counter

import msgspec
import pytest
from inprocess import System, until
from run_files import assert_spans_cover, groups, json_lines
from run_settings import sim_config

from asyncrl.checkpoint.contents import read_state
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.core.errors import NonFiniteStep, RemoteError
from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.learner.groups import intake
from asyncrl.learner.metrics.record_files import RecordFiles
from asyncrl.learner.metrics.step_lines import StepLines
from asyncrl.messages.actors import NOTICE
from asyncrl.messages.dataloader import OpenLeases
from asyncrl.messages.groups import Deliver, Holds
from asyncrl.messages.ledger import position_of
from asyncrl.observe.samples import KINDS, SampleChoice, newest_samples
from asyncrl.rollouter import actor as rollouter_module
from asyncrl.rollouter.held_leases import HeldLeases
from asyncrl.rpc.actor import Caller
from asyncrl.rpc.lifecycle.registry import Registry


@pytest.fixture
def played(tmp_path):
    """``played(**tables)``: a run that has ended."""

    def play(**tables):
        system = System(sim_config(**({"run": {"samples_per_step": 100}} | tables)), tmp_path / "run")
        system.ended = system.play()
        assert system.ended.phase == "done", system.ended
        return system

    return play


def trained_uids(system):
    return [group["uid"] for group in groups(system.run_dir)]


@pytest.mark.parametrize("on_update", ["abort_resume", "keep", "drain"])
def test_a_run_reaches_its_end_with_every_prompt_accounted_for(played, on_update):
    """I1, I2 and I3 on the whole system, in each mode of update; evaluations never train."""
    evaluation = {"data": {"source": "synthetic", "size": 10}, "every_versions": 2, "n": 2}
    system = played(
        rollout={"on_update": on_update}, learner={"steps": 12, "sim": {"step_s": 0.02}}, eval={"held": evaluation}
    )
    lines, evals = system.lines("train"), system.lines("eval")
    assert [line["step"] for line in lines] == [line["weights/version"] for line in lines] == list(range(1, 13))
    assert lines[-1]["ledger/trained"] == 12 * 4
    uids = trained_uids(system)
    assert len(uids) == len(set(uids)) == 48 and not any(uid.startswith("held") for uid in uids)
    assert system.actors["dataloader/0"].counters["tickets/outstanding"] == 0
    for trajectory in (each for group in groups(system.run_dir) for each in group["trajectories"]):
        assert_spans_cover(trajectory)
    assert not list((system.run_dir / "private").glob("*.tmp"))
    assert evals[0]["step"] == evals[0]["weights/version"] == evals[0]["eval/held/version_min"] == 0
    assert evals[-1]["eval/held/version_min"] == 12
    assert len(evals) >= 3 and {line["eval/held/prompts"] for line in evals} == {10}


def test_samples_of_filtered_groups_and_of_evaluations_are_kept(played):
    """A few of each, so that a user sees texts before the first step is trained."""
    system = played(
        run={"samples_per_step": 2},
        reward={"options": {"spread": 1.0}},
        learner={"dynamic_sampling": True, "signal_tolerance": 0.5},
        eval={"held": {"data": {"source": "synthetic", "size": 10}, "n": 2}},
    )
    kept = newest_samples(system.run_dir, SampleChoice(), 1000)
    of_kind = {kind: [group for group in kept if group.kind == kind] for kind in KINDS}
    assert Counter(group.step for group in of_kind["trained"]) == dict.fromkeys(range(1, 7), 2)
    assert Counter(group.step for group in of_kind["evaluation"]) == {0: 2, 6: 2}
    assert [group.uid for group in of_kind["evaluation"]][2:] == ["held@0-0", "held@0-1"]
    assert {group.name for group in of_kind["evaluation"]} == {"held"}
    assert [group.version for group in of_kind["evaluation"]] == [6, 6, 0, 0]
    filtered = Counter(group.step for group in of_kind["filtered"])
    assert filtered[0] == 2 and max(filtered.values()) == 2
    assert {group.reason for group in of_kind["filtered"]} == {"all rewards are equal"}
    assert all(t.length and t.text and t.finish_reason and t.reward for group in kept for t in group.trajectories)
    assert set(trained_uids(system)) == {group.uid for group in of_kind["trained"]}


def test_a_group_is_taken_only_from_the_rollouter_that_it_was_leased_to(tmp_path, monkeypatch):
    """Another rollouter that delivers it first is refused for good; it is trained when its holder delivers it."""
    system = System(sim_config(run={"samples_per_step": 100}), tmp_path / "run")
    refused = []

    class AfterAThief(HeldLeases):
        def __init__(self, rollouter, *parts):
            super().__init__(rollouter, *parts)
            self.holder = rollouter.name

        async def deliver(self, group):
            thief = system.actors["rollouter/1"]
            if self.holder != thief.name and len(refused) < 3:
                stolen = msgspec.structs.replace(group, failure="stolen")
                claimed = msgspec.structs.replace(stolen, lease=msgspec.structs.replace(group.lease, uid="0-63"))
                for attempt in (stolen, claimed):
                    with pytest.raises(RemoteError, match="rollouter/1 does not hold the lease of 0-") as caught:
                        await thief.peer("learner/0").call(Deliver(group=attempt))
                    refused.append((group.lease.uid, caught.value.code, caught.value.retryable))
            return await super().deliver(group)

    monkeypatch.setattr(rollouter_module, "HeldLeases", AfterAThief)
    assert system.play().phase == "done"
    assert {reported[1:] for reported in refused} == {("forbidden", False)}
    assert system.actors["learner/0"].counters["wire/refused"] == len(refused) >= 2
    assert {uid for uid, _, _ in refused} <= set(trained_uids(system))
    assert not (system.run_dir / "quarantine.jsonl").exists()


def test_synchronous_training_is_on_policy(played):
    """eta = 0: every token of a step was sampled by the weights that it trains."""
    assert [line["staleness/token_max"] for line in played(staleness={"max": 0}).lines("train")] == [0.0] * 6


LONG_TAIL = {"sim": {"length": "lognormal", "length_median": 8.0, "length_sigma": 1.6, "decode_step_s": 0.002}}


@pytest.mark.parametrize(("steps_per_version", "on_update"), [(1, "abort_resume"), (2, "drain")])
def test_i1_i2_no_trained_token_is_late_under_mask(played, steps_per_version, on_update):
    """Stragglers of a long tail outlive the limit, and each prompt is trained once."""
    system = played(
        data={"size": 80},
        rollout=LONG_TAIL | {"on_update": on_update},
        learner={"steps": 20, "steps_per_version": steps_per_version, "sim": {"step_s": 0.002}},
        staleness={"max": 1, "late": "mask"},
    )
    lines = system.lines("train")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert max(line["staleness/token_max"] for line in lines) <= 1
    assert sorted(trained_uids(system)) == sorted(f"0-{index}" for index in range(80))
    # With two steps per version there is enough time for most.
    if steps_per_version == 1:
        assert sum(line["staleness/masked_tokens"] for line in lines) > 0
        assert any(line["staleness/late_fraction"] > 0 for line in lines)


def test_a_line_counts_the_trained_groups_after_a_later_update_was_refused(played, monkeypatch):
    """The groups of refused updates go back, and are counted by the step that trains them."""
    train, tokens, refused = SimTrainer.train, [], []

    def refuses(trainer, plan):
        first, *later = plan.updates
        if len(tokens) == 2:
            tokens.append(first.tokens)
            refused.append(later[0].uids[0])
            raise NonFiniteStep("loss", step=3, uids=refused, trained=first.uids, metrics=train(trainer, plan))
        tokens.append(plan.tokens)
        return train(trainer, plan)

    monkeypatch.setattr(SimTrainer, "train", refuses)
    system = played(learner={"updates_per_batch": 2, "on_nonfinite": "skip"}, reward={"options": {"spread": 1.0}})
    lines = system.lines("train")
    assert [line["ledger/trained"] for line in lines] == [4, 8, 10, 14, 18, 22]
    assert lines[-1]["ledger/quarantined"] == 1
    assert not set(refused) & set(trained_uids(system))
    sampled = 0
    for line in lines:
        of_step = json_lines(system.run_dir / "samples" / f"step_{line['step']:06d}.jsonl")
        trajectories = [trajectory for group in of_step for trajectory in group["trajectories"]]
        lengths = [len(each["sequences"][0]["tokens"]) for each in trajectories]
        sampled += sum(lengths)
        assert line["reward/trained_mean"] == pytest.approx(sum(each["reward"] for each in trajectories) / len(lengths))
        assert line["rollout/length_mean"] == pytest.approx(sum(lengths) / len(lengths))
    learner = system.actors["learner/0"]
    assert learner.counters["learner/tokens"] == sum(tokens)
    assert sum(learner.histograms.taken()["staleness/tokens"].counts) == sampled


@pytest.mark.parametrize("staleness", [0, 2])
def test_i1_a_step_without_trainable_tokens_does_not_count_and_its_groups_are_replaced(played, staleness):
    """The seed decides which responses are cut, and so how many steps are empty."""
    system = played(
        data={"size": 16},
        rollout={"max_tokens": 16, "sim": {"length_median": 24.0}},
        reward={"truncated": "mask"},
        learner={"groups_per_step": 1, "steps": 12},
        staleness={"max": staleness},
    )
    learner, lines = system.actors["learner/0"], system.lines("train")
    empty = learner.counters["learner/empty_steps"]
    # A version is published for each step that counts, and for no other.
    assert [line["step"] for line in lines] == [line["weights/version"] for line in lines] == list(range(1, 13))
    assert (lines[-1]["ledger/trained"], learner.metrics()["ledger/filtered"]) == (12, empty)
    assert 0 < empty < 12
    uids = trained_uids(system)
    assert len(set(uids)) == len(uids) == 12
    notices = [line for line in system.ended.lines if (line["kind"], line.get("actor")) == (NOTICE, "learner/0")]
    truncation = [notice["text"] for notice in notices if notice["key"] == "truncation"]
    assert truncation and "of the responses of the last 8 groups were cut at rollout.max_tokens = 16" in truncation[0]
    reported = [notice for notice in notices if notice["key"] != "truncation"]
    assert len({notice["key"] for notice in reported}) == 1 and reported[-1]["count"] == empty
    assert "2 trajectories are masked, 2 because they were cut at rollout.max_tokens = 16" in reported[-1]["text"]
    assert 'reward.truncated = "mask"' in reported[-1]["text"]


def test_a_method_rejected_by_the_check_at_the_start_is_reported_to_the_user(played, monkeypatch):
    def setup(self, host, port):
        self.rejected_speedups = ["one way is off", "the other, too"]

    monkeypatch.setattr(SimTrainer, "setup", setup)
    lines = played(learner={"steps": 1}).ended.lines
    texts = [line["text"] for line in lines if (line["kind"], line.get("actor")) == (NOTICE, "learner/0")]
    assert texts == ["one way is off", "the other, too"]


@pytest.mark.parametrize("every", [0, 20])
def test_a_run_preempted_in_its_last_evaluation_keeps_its_training(tmp_path, every):
    config = sim_config(
        eval={"held": {"data": {"source": "synthetic", "size": 500}, "at_start": False, "n": 8}},
        rollout={"concurrency": 8, "sim": {"decode_step_s": 0.02}},
        checkpoint={"every_versions": every},
        preempt={"grace_s": 300.0},
    )
    system = System(config, tmp_path / "run")

    async def preempt_in_evaluation():
        learner = await system.at_step(6)
        await until(lambda: learner.states.awaiting == "last evaluations")
        await system.stop(preempt=True)

    state = system.play(preempt_in_evaluation)
    assert (state.phase, state.exit_code) == ("done", 0)
    left = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert left is not None and left.step == 6
    assert left.serial == 0, "it was written twice"
    assert [line for line in system.lines("eval") if line["eval/held/prompts"] == 500] == []


def test_a_stopped_run_drains_in_order_and_returns_groups_in_flight(tmp_path):
    system = System(sim_config(learner={"steps": 10_000}), tmp_path / "run")

    async def stop():
        await system.at_step(1)
        await system.stop()

    assert system.play(stop).phase in ("failed", "done")
    out, learner = system.actors["dataloader/0"]._book.out, system.actors["learner/0"]
    # From a dataloader that is older than any other: nothing changes.
    dataloader = Caller("dataloader/0", 0, -1, 0.0)
    in_learner = learner._deliveries.holds(Holds(uids=list(out)), dataloader).uids
    for uid, leased in out.items():
        # A lease whose reply was on its way when its rollouter ended was never seen.
        seen = system.actors[leased.rollouter].open_leases(OpenLeases(learner=0), dataloader).seen
        assert uid in in_learner or leased.number > seen, f"{uid} was neither delivered nor returned"


def test_i1_a_rollouter_that_dies_in_an_evaluation_loses_nothing_and_repeats_nothing(tmp_path):
    config = sim_config(
        eval={"held": {"data": {"source": "synthetic", "size": 24}, "n": 2, "at_end": False}},
        run={"samples_per_step": 100},
        learner={"steps": 12, "sim": {"step_s": 0.05}},
        rollout={"sim": {"decode_step_s": 0.004}},
    )
    system, deaths = System(config, tmp_path / "run"), []

    def evaluates():
        rollouter = system.actors.get("rollouter/0")
        if rollouter is None or not rollouter.metrics()["rollout/in_flight"]:
            return False
        return any("@" in uid for uid in rollouter._leases.held)

    async def kill():
        while len(deaths) < 3:
            await until(evaluates)
            await system.replace("rollouter/0")
            deaths.append("rollouter/0")

    assert system.play(kill).phase == "done" and deaths
    uids = trained_uids(system)
    assert len(uids) == len(set(uids)) == system.lines("train")[-1]["ledger/trained"] == 48
    (line,) = system.lines("eval")
    assert (line["eval/held/prompts"], line["eval/held/failed"]) == (24, 0)


@pytest.mark.parametrize(
    ("tables", "reported"),
    [
        (
            {"learner": {"dynamic_sampling": True, "max_filtered_ratio": 3.0}},
            r"no signal.*had equal rewards in themselves \(reward ",
        ),
        (
            {
                "rollout": {"max_tokens": 8, "sim": {"length": "constant", "length_median": 9.0}},
                "reward": {"truncated": "mask"},
                "learner": {"max_filtered_ratio": 2.0},
            },
            "because all were masked. To do: raise rollout.max_tokens",
        ),
        (
            {
                "reward": {"function": "exact", "options": {"answer_key": "absent"}},
                "rollout": {"max_attempts": 1},
                "learner": {"max_filtered_ratio": 2.0},
            },
            "function exact has failed in all of its .*: it raised ValueError: the row has no column 'absent'",
        ),
    ],
    ids=["no signal", "all masked", "no reward"],
)
def test_a_run_that_cannot_learn_ends_with_the_reason(played, tables, reported):
    with pytest.raises(Exception, match=f"(?s){reported}"):
        played(**tables)


def test_a_run_without_a_signal_keeps_its_training(tmp_path, monkeypatch):
    """Including the steps inside a version, and even if no checkpoint was due."""
    monkeypatch.setattr(intake.Intake, "problem", lambda it: "no signal" if it.ledger.count("trained") >= 12 else None)
    config = sim_config(
        learner={"steps": 40, "groups_per_step": 4, "steps_per_version": 2}, checkpoint={"every_versions": 100}
    )
    with pytest.raises(Exception, match="no signal"):
        System(config, tmp_path / "run").play()
    kept = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert kept is not None and kept.step == 3


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Registry, "resolve"), (RunStateMachine, "checkpoint_written"), (RunStateMachine, "finish")],
)
def test_a_learner_asks_again_if_its_controller_fails_to_answer(played, monkeypatch, owner, name):
    """For the meeting of all ranks, for a complete checkpoint, and for the end of the run."""

    def once(self, *arguments, **more):
        # Only a rank of the learner asks for an actor that is not ready.
        if not failed and (owner is not Registry or more["unready"]):
            failed.append(name)
            raise RuntimeError("not now")
        return real(self, *arguments, **more)

    failed, real = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, once)
    played(learner={"ranks": 2}, checkpoint={"every_versions": 2})
    assert failed == [name]


def test_i1_prompts_over_the_limit_are_left_out_once_each_epoch_and_end_no_run(played, tmp_path):
    """A third of the prompts is over the limit, and no quarantined prompt is allowed."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * (9 if n % 3 else 99)}) + "\n" for n in range(30)))
    system = played(
        data={"source": "jsonl", "path": str(prompts), "max_prompt_tokens": 20},
        learner={"steps": 40, "groups_per_step": 4, "max_quarantined_fraction": 1e-9, "max_filtered_ratio": 1.0},
    )
    last = system.lines("train")[-1]
    assert (last["ledger/trained"], last["ledger/quarantined"]) == (160, 0)
    # The groups are those of eight epochs, and each epoch has ten prompts over the limit.
    assert 70 <= last["ledger/left_out"] <= 90
    assert not (system.run_dir / "quarantine.jsonl").exists()
    assert not any(position_of(uid)[1] % 3 == 0 for uid in trained_uids(system))


def test_a_checkpoint_is_complete_only_once_its_quarantined_prompts_are_written(played, monkeypatch):
    """Even if its lines take longer than the checkpoint itself: a resumed run does not write them again."""

    def slowly(records, step, found):
        # The first ones take long to write, later ones do not.
        if not begun.is_set():
            begun.set()
            committing.wait(1.0)
        write(records, step, found)

    def complete(folder, partial, **facts):
        quarantined = read_state(partial).ledger.counts["quarantined"]
        held.append((quarantined, len(json_lines(partial.parents[1] / "quarantine.jsonl"))))
        if quarantined:
            committing.set()
        return commit(folder, partial, **facts)

    async def written(lines, step):
        """The line of the step was there before."""

    held, begun, committing = [], threading.Event(), threading.Event()
    write, commit = RecordFiles.quarantined, CheckpointFolder.commit
    monkeypatch.setattr(RecordFiles, "quarantined", slowly)
    monkeypatch.setattr(CheckpointFolder, "commit", complete)
    monkeypatch.setattr(StepLines, "written", written)
    monkeypatch.setattr(intake, "check_group", lambda group: "odd" if group.lease.index % 8 == 3 else None)
    played(checkpoint={"every_versions": 1}, learner={"steps": 12, "sim": {"step_s": 0.05}})
    assert held[-1][0]
    assert all(written >= quarantined for quarantined, written in held), held

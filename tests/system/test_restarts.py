"""I1 over the deaths of whole actors in one process: any actor dies at any time, and each prompt is trained once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from inprocess import System, until
from run_files import groups, metrics
from run_settings import sim_config

from asyncrl.checkpoint.contents import read_state
from asyncrl.checkpoint.folder import CheckpointFolder, is_leftover
from asyncrl.messages.actors import NOTICE, Dead
from asyncrl.messages.ledger import Ledger, position_of

STEPS, GROUPS = 24, 4
ONE_EACH = ("dataloader/0", "learner/0", "rollouter/0", "parameter_server/0")


def config(**tables: dict[str, Any]) -> Any:
    base: dict[str, dict[str, Any]] = {
        "data": {"size": 30},
        "run": {"samples_per_step": 100},
        "learner": {"steps": STEPS, "groups_per_step": GROUPS, "sim": {"step_s": 0.02}},
        # With routes, so that the learner notices a token with the route of another one.
        "rollout": {"sim": {"decode_step_s": 0.003, "routes": True}},
        "checkpoint": {"every_versions": 3},
        "network": {"call_timeout_s": 3.0},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return sim_config(**base)


def history(run_dir: Path) -> dict[int, list[str]]:
    """The uids trained by each step, in the history of the final weights."""
    starts: dict[int, int] = {}
    for line in metrics(run_dir, "train"):
        starts[line["step"]] = max(starts.get(line["step"], 0), line["start"])
    found: dict[int, list[str]] = {step: [] for step in starts}
    for group in groups(run_dir):
        if group["start"] == starts[group["step"]]:
            found[group["step"]].append(group["uid"])
    return found


def final_ledger(run_dir: Path) -> Ledger:
    newest = CheckpointFolder(run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.step == STEPS
    return Ledger.restore(read_state(newest.path).ledger)


def audit(run_dir: Path) -> None:
    steps = history(run_dir)
    assert sorted(steps) == list(range(1, STEPS + 1))
    trained = [uid for uids in steps.values() for uid in uids]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS
    ledger = final_ledger(run_dir)
    assert ledger.count("trained") == STEPS * GROUPS
    assert not any(ledger.is_open(*position_of(uid)) for uid in trained)
    # Epochs follow one another: every finished one is complete.
    last = max(position_of(uid)[0] for uid in trained)
    assert all(ledger.concluded(epoch) == 30 for epoch in range(last - 1))


def torment(system: System, victims: list[str], randomness: random.Random) -> None:
    async def kill() -> None:
        await system.at_step(1)
        for victim in victims:
            await asyncio.sleep(randomness.uniform(0.02, 0.4))
            if system.actors["learner/0"].step >= STEPS:  # type: ignore[attr-defined]
                break
            await system.replace(victim)

    assert system.play(kill, timeout=100).phase == "done"


@pytest.mark.parametrize(
    "victims",
    [
        ["learner/0"] * 3,
        ["dataloader/0"] * 3,
        ["rollouter/0", "parameter_server/0", "reward/1"] * 2,
        random.Random(1).choices([*ONE_EACH, "rollouter/1", "reward/0"], k=8),
    ],
    ids=["learner", "dataloader", "others", "anybody"],
)
def test_i1_each_prompt_is_trained_once_over_repeated_deaths(tmp_path: Path, victims: list[str]) -> None:
    torment(System(config(reward={"pools": 2}), tmp_path / "run"), victims, random.Random(2))
    audit(tmp_path / "run")


def test_i1_a_rollouter_that_only_the_reward_pool_counts_as_dead_costs_no_prompt(tmp_path: Path) -> None:
    """As when the pool hears of the loss of its host before the learner does."""
    system = System(config(), tmp_path / "run")

    async def refuse() -> None:
        await system.at_step(2)
        rollouter = system.actors["rollouter/0"].context
        system.actors["reward/0"].fence([Dead("rollouter/0", rollouter.incarnation)])
        await until(lambda: system.actors["rollouter/0"].context.incarnation > rollouter.incarnation)

    assert system.play(refuse, timeout=100).phase == "done"
    audit(tmp_path / "run")
    assert final_ledger(tmp_path / "run").count("quarantined") == 0


def test_i1_i2_no_death_under_a_hard_bound_costs_a_prompt_or_trains_a_late_token(tmp_path: Path) -> None:
    randomness = random.Random("mask")
    names = [*ONE_EACH, "rollouter/1"]
    tail = {"sim": {"length": "lognormal", "length_median": 8.0, "decode_step_s": 0.004}}
    system = System(config(rollout=tail, staleness={"max": 1, "late": "mask"}), tmp_path / "run")
    torment(system, [*randomness.sample(names, 5), "learner/0", "dataloader/0"], randomness)
    audit(tmp_path / "run")
    assert max(line.get("staleness/token_max", 0.0) for line in system.lines("train")) <= 1


def test_i1_a_learner_steps_back_over_a_damaged_checkpoint_and_a_lost_mark(tmp_path: Path) -> None:
    run_dir, seen = tmp_path / "run", []
    system = System(config(checkpoint={"keep": 3}), run_dir)

    def damage() -> None:
        folder = CheckpointFolder(run_dir / "checkpoints")
        # Here the thread of a dead learner lives on, and would complete a newer checkpoint.
        patience = time.monotonic() + 20.0
        while any(map(is_leftover, os.listdir(run_dir / "checkpoints"))) and time.monotonic() < patience:
            time.sleep(0.01)
        newest, *others = folder.candidates()
        assert others, "there is one to step back to"
        seen.extend([newest.name, others[0].name, folder.highest_version()])
        os.truncate(newest / "groups.msgpack", 1)
        (run_dir / "version_mark.json").unlink()

    def whole() -> bool:
        """Whether there are two checkpoints, and the lines name the same versions as the mark."""
        if len(CheckpointFolder(run_dir / "checkpoints").candidates()) < 2:
            return False
        reported = [line["weights/version"] for line in system.lines("train")]
        used = json.loads((run_dir / "version_mark.json").read_text())["version"]
        return reported[-1:] == [used]

    async def kill() -> None:
        await until(whole)
        await system.replace("learner/0", damage)

    state = system.play(kill, timeout=100)
    assert state.phase == "done"
    audit(run_dir)
    damaged, taken, highest = seen
    assert (run_dir / "checkpoints" / f"damaged-{damaged}" / "groups.msgpack").exists()
    reported = {
        line["key"]: line["text"] for line in state.lines if line["kind"] == NOTICE and line["actor"] == "learner/0"
    }
    assert reported.pop("version mark").startswith(
        f"{run_dir / 'version_mark.json'} is not there; new versions are above "
    )
    (text,) = (text for text in reported.values() if text.startswith(f"checkpoint {damaged}, now "))
    assert f"newest whole one, {taken} of step" in text
    published = [line["weights/version"] for line in system.lines("train") if line["start"] == 2]
    assert min(published) > highest


def test_a_learner_without_checkpoints_starts_from_the_beginning(tmp_path: Path) -> None:
    torment(System(config(checkpoint={"every_versions": 0}), tmp_path / "run"), ["learner/0"], random.Random(1))
    trained = [uid for uids in history(tmp_path / "run").values() for uid in uids]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS

"""Simulated runs whose episodes are played on the rollouters' hosts and on one of their own, which dies or freezes."""

import json
import os
import re
import signal

import pytest
from launcher.launched import GROUPS, sim_tree

from tools.chaos.audit import Expected, audit
from tools.waiting import wait_until

EXTRA = "episodes/2"
"""Where rollouters are on a and b."""


@pytest.fixture
def playing(launch_placed, tmp_path):
    def start(steps, supervision=None, **episode):
        options = {"turns": 3.0, "tool_s": 0.2, "tool_sigma": 0.3, "observation": 40.0}
        tree = sim_tree(
            tmp_path,
            run={"samples_per_step": GROUPS},
            data={"size": 2 * GROUPS * steps, "max_prompt_tokens": 64, "template": "chat"},
            episode={
                "function": "asyncrl.episodes.rehearsal:play",
                "options": options,
                "workers": 1,
                "max_context_tokens": 2048,
                **episode,
            },
            rollout={"episodes": 6, "retry_backoff_s": 0.1},
            learner={"steps": steps, "sim": {"step_s": 0.1, "publish_bytes": 4096}},
            staleness={"max": 2},
            checkpoint={"every_versions": 4, "export_at_end": False},
            supervision={"silence_s": 3.0, "backoff_s": 0.1} | (supervision or {}),
        )
        del tree["reward"]
        return launch_placed(tree, hosts=["head", "a", "b", "c"])

    return start


def lines(run, actor):
    text = (run.run_dir / "logs" / "attempt_1" / f"{actor.replace('/', '-')}.log").read_text()
    # The last may not be whole so far.
    return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]


def samples(run):
    """Events of each sample, as [what, facts ...] in order."""
    found = [line for actor in ("rollouter/0", "rollouter/1") for line in lines(run, actor)]
    left = [line for line in found if line["event"] == "generated" and line["end"] != "running"]
    return [[event[1:] for event in sample] for line in left for sample in line["samples"]]


def assert_exact(run, steps):
    code, shown = run.end()
    assert code == 0, shown
    findings = audit(run.run_dir, Expected(steps=steps, groups_per_step=GROUPS, prompts=2 * GROUPS * steps))
    assert [str(problem) for problem in findings.problems] == []


def failures(sample):
    """(host, why) of what failed of a sample, but for what its rollouter gave up at the end."""
    host, found = "", []
    for what, *facts in sample:
        if what == "episode":
            host = facts[1]
        elif what == "failed":
            found.append((host, facts[0]))
    return found


def moved_to(sample):
    """The host that played a sample last."""
    return next(event[2] for event in reversed(sample) if event[0] == "episode")


def wait_to_play_on_extra(run):
    """Wait until an episode has ended on EXTRA, which may still start while the others play."""
    wait_until(
        lambda: any(event[0] == "episode" and event[2] == EXTRA for sample in samples(run) for event in sample),
        f"an episode on {EXTRA}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_i1_episodes_of_a_lost_host_are_played_on_another_and_nothing_is_lost(playing, how):
    """I1: and no attempt is counted. Training continues also without a controller."""
    # Enough for a successor to have steps left to play for; one that is frozen is found out after a while.
    steps = 48 if how == "killed" else 72
    run = playing(steps)
    run.wait_to_show("step 3/")
    wait_to_play_on_extra(run)
    os.kill(run.actor(EXTRA), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    run.wait_to_show(f"{EXTRA} is ready again")
    if how == "killed":
        learner = run.actor("learner/0")
        os.kill(run.actor("controller/0"), signal.SIGKILL)
        run.wait_to_show("controller/0 died (killed by SIGKILL) and is started again")
        # Its successor hands on what is trained from then on.
        wait_until(lambda: "step " in run.shown.rpartition("is started again")[2], "another step")
        assert run.actor("learner/0") == learner
    assert_exact(run, steps)
    deaths = [line for line in run.shown.splitlines() if " died " in line]
    assert deaths[0].startswith(f"{EXTRA} died (killed by SIGKILL") and len(deaths) == (2 if how == "killed" else 1)
    played = samples(run)
    lost = [sample for sample in played if failures(sample)]
    assert lost and {host for sample in lost for host, _ in failures(sample)} == {EXTRA}
    assert all("it starts again, no attempt is counted" in why for sample in lost for _, why in failures(sample)), lost
    assert {moved_to(sample) for sample in lost} <= {"episodes/0", "episodes/1"}
    began = {event[2] for sample in played for event in sample if event[0] == "episode"}
    assert began == {"episodes/0", "episodes/1", EXTRA}
    # Its successor plays as well.
    assert lines(run, EXTRA)[-1]["counters"]["episodes/played"] > 0


@pytest.mark.slow
def test_i1_episodes_of_a_frozen_host_miss_their_deadlines_and_move_to_another(playing):
    """I1: the deadlines of its stages end the episodes of a frozen host, if no detector has found the host yet."""
    run = playing(24, supervision={"silence_s": 600.0}, turn_timeout_s=2.0, timeout_s=4.0)
    run.wait_to_show("step 3/")
    wait_to_play_on_extra(run)
    pid = run.actor(EXTRA)
    os.kill(pid, signal.SIGSTOP)

    def late():
        return [sample for sample in samples(run) if EXTRA in dict(failures(sample))]

    wait_until(late, "what is late")
    os.kill(pid, signal.SIGCONT)
    assert_exact(run, 24)
    assert EXTRA + " died" not in run.shown
    for sample in late():
        played = [event[2] for event in sample if event[0] == "episode"]
        assert played[played.index(EXTRA) + 1] in ("episodes/0", "episodes/1"), sample
        assert sample[-1][0] in ("ended", "scored"), sample
        why = dict(failures(sample))[EXTRA]
        assert re.match(r"(episode|generation): (host|start|turn): ", why), why

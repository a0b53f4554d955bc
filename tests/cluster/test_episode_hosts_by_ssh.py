"""Hosts with CPUs alone play episodes too: the actor of one dies, one is lost, one leaves."""

import os
import signal

from cluster.launches import Launch, process
from cluster.test_join_leave import Run

FLAGS = (
    "--rollout.replicas=1",
    "--rollout.episodes=16",
    "--episode.function=asyncrl.episodes.rehearsal:play",
    "--episode.options={turns = 3.0, tool_s = 0.2, tool_sigma = 0.3, observation = 40.0}",
    "--episode.workers=1",
    "--episode.max_context_tokens=2048",
    "--data.template=chat",
    "--data.max_prompt_tokens=64",
    "--supervision.host_grace_s=30",
)
HOSTS = "head\na\nb\nc\n"


def test_i1_i6_i7_hosts_without_a_rollouter_play_episodes_die_and_are_lost(cluster, folder):
    """The learner is on the head, the rollouter on a, the reward pool and an episode host are on b."""
    plan = Launch(cluster, folder, HOSTS, *FLAGS, "--data.source=synthetic", "--dry-run")
    code, shown = plan.end()
    assert code == 0, shown
    rows = [line.split() for line in shown]
    assert [row[:3] for row in rows if row and row[0].startswith("episodes/")] == [
        ["episodes/0", "a", "CPU"],
        ["episodes/1", "b", "CPU"],
        ["episodes/2", "c", "CPU"],
    ]
    run = Run(cluster, folder, 30, *FLAGS, hosts=HOSTS)
    run.wait_to_show("step 4/")
    os.kill(process(cluster["b"], "asyncrl episodes/1"), signal.SIGKILL)
    run.wait_to_show("episodes/1 is ready again")
    run.wait_for_step(4)
    cluster["c"].power_off()
    run.wait_to_show("host c (agent/3) is lost")
    run.is_exact()
    reported = [
        event[1:] for line in run.events("rollouter-0", "generated") for sample in line["samples"] for event in sample
    ]
    at = [facts[1] for what, *facts in reported if what == "episode"]
    assert set(at) == {"episodes/0", "episodes/1", "episodes/2"}
    failed = [facts[0] for what, *facts in reported if what == "failed"]
    for host in ("episodes/1", "episodes/2"):
        assert any(host in why for why in failed), failed
    assert all("no attempt is counted" in why or "episode host is away" in why for why in failed), failed
    run.is_gone_from("a", "b")


def test_i1_a_host_that_plays_episodes_leaves(cluster, folder):
    """It starts no new episode, and finishes those in flight."""
    run = Run(cluster, folder, 30, *FLAGS, hosts=HOSTS)
    run.wait_to_show("step 4/")
    code, shown = run.leave("c", "--within", "60").end()
    assert code == 0, shown
    assert shown[-1] == "c has left the run: episodes/2 have ended, and the run continues without them"
    run.wait_for_step(4)
    run.is_exact()
    (reported,) = (line for line in run.events("rollouter-0", "ended"))
    assert "rollout/episodes_failed/host" not in reported["counters"]

"""Any order of updates, failures, deaths and time: the invariants hold, and all replicas reach the newest version."""

import random

from update_world import World

from asyncrl.parameter_server.broadcast_control import LEFT_OUT_MAX
from asyncrl.parameter_server.replicas import TRANSITIONS, Replica


def live(world, seconds):
    """All callers ask, and nothing fails."""
    for _ in range(seconds):
        for _ in range(3):
            for name in world.replicas:
                world.step(name)
            world.step_learner()
            world.publish_announced()
            world.send()
        for caller in world.replicas.values():
            if caller.state[0] == "receiving" and caller.state[1:] != world.learner.state[1:]:
                # Nothing arrives: the replica has a deadline of its own.
                world.fail(caller.name)
        world.later(1)
        for caller in world.callers():
            world.end_of_park(caller)


def reaches_the_newest_version(world):
    """While nothing fails, all replicas come to serve the newest version, and the next ones are broadcast to all."""
    live(world, 40)
    assert {caller.serving for caller in world.replicas.values()} == {world.published}
    world.forget_sent()
    for _ in range(LEFT_OUT_MAX * (world.weights.transport == "gloo")):
        # After broadcasts that broke, versions are left out.
        begun = world.conductor.metrics()["broadcasts_begun"]
        world.begin_version()
        live(world, 6)
        world.forget_sent()
        if world.conductor.metrics()["broadcasts_begun"] > begun:
            break
    for _ in range(2):
        begun = world.conductor.metrics()["broadcasts_begun"]
        world.begin_version()
        live(world, 6)
        assert {caller.serving for caller in world.replicas.values()} == {world.published}
        world.forget_sent()
        broadcasts = world.conductor.metrics()["broadcasts_begun"] - begun
        assert broadcasts == (world.weights.transport == "gloo")


def test_long_runs_take_every_transition(monkeypatch):
    taken = set()
    follow = Replica.follow

    def noted(replica, event):
        before = replica.phase
        changed = follow(replica, event)
        if changed:
            taken.add((before, event))
        return changed

    monkeypatch.setattr(Replica, "follow", noted)
    for seed in range(48):
        transport, fraction = "gloo" if seed % 3 else "shm", 0.1 if seed % 2 else 0.7
        long_run(
            random.Random(seed),
            transport=transport,
            fraction=fraction,
            hosts=(("h", "h", ""), ("h", "h", "h"), ("",) * 3)[seed % 4 % 3],
        )
    assert set(TRANSITIONS) == taken


def long_run(dice, *, transport, fraction, hosts):
    world = World(transport=transport, max_paused_fraction=fraction, versions_held=2, stage_deadline_s=30, hosts=hosts)
    usual = {
        lambda: world.step(dice.choice(names)): 40,
        lambda: world.step_learner(): 15,
        lambda: (world.forget_sent(), world.begin_version()): 4,
        lambda: world.publish_announced(): 4,
        lambda: world.send(): 6,
        lambda: world.later(dice.choice([0.1, 0.5, 1.0])): 8,
        lambda: world.end_of_park(dice.choice(world.callers())): 8,
    }
    lost = lambda: dice.random() < 0.5  # noqa: E731
    trouble = {
        lambda: world.step(dice.choice(names), lost=True): 6,
        lambda: world.step_learner(lost=True): 1,
        lambda: world.send("connection reset"): 1,
        lambda: world.fail(dice.choice(names), lost()): 5,
        lambda: world.repeat_report(dice.choice(names)): 3,
        lambda: world.lose_engine(dice.choice(names), lost()): 2,
        lambda: world.give_up(dice.choice(names), lost()): 5,
        lambda: world.sleep_in_turn(dice.choice(names), lost()): 5,
        lambda: world.die(dice.choice(names), lost()): 1,
        lambda: world.later(dice.choice([5, 11, 40])): 2,
        lambda: world.cancel_learner(): 0.5,
        lambda: world.learner_dies(): 0.5,
        lambda: world.start_server(): 0.5,
    }
    names = list(world.replicas)
    actions = {**usual, **{action: weight * 0.4 for action, weight in trouble.items()}}
    for action in dice.choices(list(actions), weights=list(actions.values()), k=600):
        action()
        check_held_versions(world)
    reaches_the_newest_version(world)


def check_held_versions(world):
    """The newest version, and what is staged unless it was let go, but never too many."""
    conductor = world.conductor
    needed = conductor.needed()
    assert conductor.newest in needed or conductor.newest < 0
    assert len(needed) <= world.weights.versions_held
    for caller in world.replicas.values():
        known = conductor.replicas.by_name.get(caller.name)
        # Updates of another server, and a successor that has sent no message, are unknown here.
        if caller.state[0] == "staging" and known and known.incarnation == caller.incarnation:
            assert caller.state[1] in needed or known.target == -1 or not known.pins

"""The conductor's work for one message does not grow with the number of replicas."""

import pytest
from conductor_play import LEARNER, Play, announcement
from work import steps_of

from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import NextUpdate, ReportUpdate, RequestLoad

HOSTS = 8
"""Replicas on each host, where they are on hosts."""


def serving(count, *, assigned=0, transport="stream", **place):
    """Replicas; the first ones, this many, are assigned version 1."""
    play = Play(transport=transport, max_paused_fraction=0.5)
    for i in range(count):
        host = f"host-{i // HOSTS}" if place.get("hosts") else ""
        play.conductor.ask(f"r/{i}", 1, NextUpdate(serving=0, host=host), play.now, same_host=not host)
    if assigned:
        play.publish(1)
    for i in range(assigned):
        look(play, i)
    return play


def look(play, i):
    """The answer to what a replica has asked."""
    return play.conductor.answer(play.conductor.replicas._open[f"r/{i}"], play.now)


def ask_for_pause(count):
    """Half of all load, and one more asks."""
    play = serving(count, assigned=count)
    for i in range(count - 1):
        play.conductor.ask(f"r/{i}", 1, RequestLoad(version=1), play.now)
    return lambda: play.conductor.ask(f"r/{count - 1}", 1, RequestLoad(version=1), play.now)


def commit(count):
    """Half of all load, and one of them has loaded: another may pause."""
    play = serving(count, assigned=count)
    for i in range(count):
        play.conductor.ask(f"r/{i}", 1, RequestLoad(version=1), play.now)
    loading = next(name for name, phase in play.phases().items() if phase == "loading")
    report = ReportUpdate(version=1, committed=True, times=UpdateTimes(version=1))
    return lambda: play.conductor.report(loading, 1, report, play.now)


def look_at_announcement(count):
    """The others of its host wait for one of them, as everywhere."""
    play = serving(count, assigned=count - 1, hosts=True)
    return lambda: look(play, count - 1)


def join(count):
    """All but two members of a broadcast are paused."""
    play = serving(count, transport="gloo")
    play.publish(0)
    play.conductor.ask(*LEARNER, announcement(1), play.now)
    request = RequestLoad(version=1, epoch=look(play, 0).update.broadcast.group.epoch)
    for i in range(count - 2):
        play.conductor.ask(f"r/{i}", 1, request, play.now)
    return lambda: play.conductor.ask(f"r/{count - 2}", 1, request, play.now)


def deadline(count):
    play = serving(count, assigned=count)
    return play.conductor.next_deadline


@pytest.mark.parametrize("make", [ask_for_pause, commit, join, deadline])
def test_one_message_of_many_replicas_is_not_more_work(make):
    assert steps_of(make(400)) < 1.2 * steps_of(make(50)) + 20


def test_an_announcement_visits_its_own_host_and_once_each_fetching_host():
    assert steps_of(look_at_announcement(400)) < 400 / HOSTS * 10 + steps_of(look_at_announcement(HOSTS)) + 100

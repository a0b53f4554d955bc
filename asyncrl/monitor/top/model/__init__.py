"""The Document, made from snapshots: the only place where figures are given a meaning. Pure."""

from __future__ import annotations

from asyncrl.monitor.top.document import Document
from asyncrl.monitor.top.history import History
from asyncrl.monitor.top.model.actors import rank, rollouter
from asyncrl.monitor.top.model.episodes import episodes
from asyncrl.monitor.top.model.facts import Facts
from asyncrl.monitor.top.model.run import learning, phases, run_row
from asyncrl.monitor.top.model.stages import bottleneck, stages
from asyncrl.monitor.top.model.views import ledger, reward, staleness, weights


def build(history: History) -> Document:
    """Document of the newest snapshot; there must be one."""
    snapshot = history.newest
    assert snapshot is not None
    facts = Facts(snapshot, history)
    rollouters = [rollouter(facts, actor) for actor in facts.of("rollouter")]
    pool, prompts, updates = reward(facts), ledger(facts), weights(facts, rollouters)
    verdict = bottleneck(facts, pool, prompts)
    return Document(
        wall=snapshot.wall,
        window_s=facts.window_s,
        run=run_row(facts, rollouters),
        bottleneck=verdict,
        stages=stages(facts, verdict, rollouters, pool, updates, prompts),
        rollouters=rollouters,
        ranks=[rank(facts, actor) for actor in facts.of("learner")],
        phases=phases(facts),
        learning=learning(facts),
        weights=updates,
        staleness=staleness(facts),
        reward=pool,
        ledger=prompts,
        episodes=episodes(facts),
        events=snapshot.events,
        actors=snapshot.actors,
    )

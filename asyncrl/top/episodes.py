"""Episodes by what they are at, and what came of those before, from snapshots. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.snapshot import ActorView
from asyncrl.telemetry.catalogue import edges_of, quantile
from asyncrl.telemetry.snapshots.rates import Shares, mean, total
from asyncrl.top.facts import UNHEARD, Facts
from asyncrl.top.figures.bottleneck import by_kind
from asyncrl.top.figures.document import EpisodeHostRow, EpisodeStageRow, EpisodesView
from asyncrl.top.source.history import GONE, stages_of


def episodes(facts: Facts) -> EpisodesView | None:
    """The episodes; None where a prompt has one response."""
    rollouters, living, hosts = facts.of("rollouter"), facts.living("rollouter"), facts.of("episodes")
    if not hosts:
        return None
    at, shares = stages_of(living), _shares(facts)
    turns, prompts = _seen(facts, "rollout/turns"), _seen(facts, "rollout/prompt_tokens")
    names = sorted({*at, *shares}, key=lambda name: (-at.get(name, 0.0), -shares.get(name, 0.0), name))
    return EpisodesView(
        open=facts.level("rollouter", "rollout/episodes"),
        oldest_s=max((actor.figures.get("rollout/episodes_oldest_s", 0.0) for actor in living), default=None),
        stages=[
            EpisodeStageRow(name=name, open=at.get(name), share=shares.get(name))
            for name in names
            if at.get(name) or shares.get(name)
        ],
        turns_mean=_mean(turns),
        turns_p95=quantile(turns[0], edges_of("rollout/turns"), 0.95),
        prompt_tokens_mean=_mean(prompts),
        cost_factor=mean(actor.figures.get("rollout/cost_factor") for actor in rollouters),
        reprefill_tokens=facts.counted("rollouter", "rollout/reprefill_tokens"),
        malformed_calls=facts.counted("rollouter", "rollout/malformed_calls"),
        ended=_family(rollouters, "rollout/episodes_ended/"),
        failed=_family(rollouters, "rollout/episodes_failed/"),
        forks=_family(rollouters, "rollout/forks/"),
        hosts=[_host(facts, actor) for actor in hosts],
    )


def _host(facts: Facts, actor: ActorView) -> EpisodeHostRow:
    gone = actor.condition in GONE
    return EpisodeHostRow(
        **facts.placed(actor),
        workers=0 if gone else len(actor.resources),
        kinds=by_kind(facts.shares([actor])),
        open=None if gone else actor.figures.get("episodes/open"),
        waiting=None if gone else actor.figures.get("episodes/waiting"),
        played=actor.figures.get("episodes/played"),
        failed=actor.figures.get("episodes/failed"),
        tool_calls=actor.figures.get("episodes/tool_calls"),
        tool_errors=total((actor.figures.get("episodes/tool_errors"), actor.figures.get("episodes/tool_mistakes"))),
        lost_workers=total((actor.figures.get("episodes/workers_killed"), actor.figures.get("episodes/workers_died"))),
        restarts=actor.restarts,
    )


def _family(actors: Iterable[ActorView], beginning: str) -> dict[str, float]:
    """Counters of which each has a name of its own, added up, the largest first."""
    found: dict[str, float] = {}
    for actor in actors:
        for name, value in actor.figures.items():
            if name.startswith(beginning) and value:
                name = name.removeprefix(beginning)
                found[name] = found.get(name, 0.0) + value
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _shares(facts: Facts) -> Shares:
    """Shares of the time of episodes that have ended meanwhile, by stage."""
    spent: dict[str, float] = {}
    for actor in facts.of("rollouter"):
        if actor.condition in UNHEARD:
            continue
        before = facts.steps.before(actor)
        earlier = _family([before], "rollout/episode_s/") if before is not None else {}
        for stage, seconds in _family([actor], "rollout/episode_s/").items():
            spent[stage] = spent.get(stage, 0.0) + max(0.0, seconds - earlier.get(stage, 0.0))
    whole = sum(spent.values())
    return {stage: seconds / whole for stage, seconds in spent.items() if seconds > 0} if whole > 0 else {}


def _seen(facts: Facts, name: str) -> tuple[list[int], float]:
    """Values that the histograms of all rollouters have taken in meanwhile: counts by bucket, and the sum."""
    counts, whole = [0] * (len(edges_of(name)) + 1), 0.0
    for actor in facts.of("rollouter"):
        seen = facts.steps.histogram(actor, name)
        if seen is not None and len(seen.counts) == len(counts):
            counts = [one + other for one, other in zip(counts, seen.counts, strict=True)]
            whole += seen.sum
    return counts, whole


def _mean(seen: tuple[list[int], float]) -> float | None:
    counts, whole = seen
    return whole / sum(counts) if sum(counts) else None

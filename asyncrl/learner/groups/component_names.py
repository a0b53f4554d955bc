"""The names of reward components in a run: the first few are kept, values under all further names are left out. Pure.

Each name becomes a metric of every step, an array of every group and a series in every sink. A function whose names
follow from the data would grow them without bound.

Invariant: the groups that a learner takes have at most ``outcome.MOST_NAMES`` names in all. Names that the
configuration or asyncrl itself reads are kept as well. The reward of a trajectory does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from asyncrl.config import Config
from asyncrl.messages.groups import Group
from asyncrl.messages.reward import MOST_NAMES, PENALTY_COMPONENT, TIMED_OUT_COMPONENT
from asyncrl.workers.user_code import find_place


class ComponentNames:
    """The names of a run. ``known`` are those of its checkpoint."""

    def __init__(self, config: Config, known: Iterable[str] = ()) -> None:
        learner = config.learner
        self._always = {PENALTY_COMPONENT, TIMED_OUT_COMPONENT, learner.signal, *_texts(learner.advantage_options)}
        self._names = dict.fromkeys(list(known)[:MOST_NAMES])
        self._config = config
        self.left_out = 0
        """Values that were left out."""
        self._first = ""
        """The first name that was left out."""

    @property
    def names(self) -> list[str]:
        """The names that are kept, in the order in which they came."""
        return list(self._names)

    def trim(self, group: Group) -> bool:
        """Leave out components under further names; whether there were any."""
        before = self.left_out
        for trajectory in group.trajectories:
            further = [name for name in trajectory.components if not self._is_kept(name)]
            if further:
                self._first = self._first or further[0]
                self.left_out += len(further)
                kept = trajectory.components.keys() - set(further)
                trajectory.components = {name: each for name, each in trajectory.components.items() if name in kept}
        return self.left_out > before

    def notice(self) -> str:
        """The text for the user: whose names they are, what follows, and what to do.

        After ``trim`` has found any. It parses the file of the user's function, so call it once, in a thread.
        """
        episode, reward = self._config.episode, self._config.reward
        spec = reward.function
        if reward.function == "episode":
            code = getattr(episode, episode.kind, reward.function)
            spec = code if isinstance(code, str) else " ".join(code)
        place = find_place(spec)
        where = f" ({place})" if place else ""
        return (
            f"{spec}{where} returns rewards with more than {MOST_NAMES} names of components; the first of the others "
            f"is {self._first!r}. Components under further names are left out of metrics, samples and advantages; "
            "rewards stay as they are. Return the same few names for every response: a name must not depend on the data"
        )

    def _is_kept(self, name: str) -> bool:
        if name in self._names or name in self._always:
            return True
        if len(self._names) < MOST_NAMES:
            self._names[name] = None
            return True
        return False


def _texts(value: Any) -> Iterator[str]:
    """All text in a value of the configuration: an advantage may name components in its options."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from (*_texts(key), *_texts(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)

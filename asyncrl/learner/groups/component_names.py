"""The names of reward components that a run keeps.

Each name of a reward component becomes a metric of every step, an array of every group and a series in every sink. A
function whose names follow from the data would grow them without bound. So the groups that a learner takes have at most
``MOST_NAMES`` names in all; values under further names are left out. Names that the configuration or asyncrl itself
reads are always kept, in addition. The reward of a trajectory does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from asyncrl.config import Config
from asyncrl.messages.groups import Group
from asyncrl.messages.reward import MOST_NAMES, PENALTY_COMPONENT, TIMED_OUT_COMPONENT
from asyncrl.workers.user_code import find_place


class ComponentNames:
    """The names of reward components that a run keeps. ``known`` are the names that its checkpoint kept."""

    def __init__(self, config: Config, known: Iterable[str] = ()) -> None:
        learner = config.learner
        self._always_kept = {PENALTY_COMPONENT, TIMED_OUT_COMPONENT, learner.signal, *_texts(learner.advantage_options)}
        self._names = dict.fromkeys(list(known)[:MOST_NAMES])
        """The first MOST_NAMES names that came, as keys; without those of ``_always_kept``."""
        self._config = config
        self.left_out = 0
        """Number of values that were left out."""
        self._first_left_out = ""
        """The first name that was left out; empty before."""

    @property
    def names(self) -> list[str]:
        """The names that are kept, in the order in which they came first."""
        return list(self._names)

    def trim(self, group: Group) -> bool:
        """Admit new names while there is room, and remove the components under all other names from a group.

        Returns whether it removed any.
        """
        left_out_before = self.left_out
        for trajectory in group.trajectories:
            for name in list(trajectory.components):
                if name in self._names or name in self._always_kept:
                    continue
                if len(self._names) < MOST_NAMES:
                    self._names[name] = None
                    continue
                del trajectory.components[name]
                self.left_out += 1
                self._first_left_out = self._first_left_out or name
        return self.left_out > left_out_before

    def notice(self) -> str:
        """Compose the text for the user: whose names they are, what follows, and what to do.

        Call it once, after ``trim`` returned True, and in a thread: it parses the file of the user's function.
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
            f"is {self._first_left_out!r}. Components under further names are left out of metrics, samples and "
            "advantages; rewards stay as they are. Return the same few names for every response: a name must not "
            "depend on the data"
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a configuration value: an advantage may name components in its options."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from (*_texts(key), *_texts(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)

"""Roles of a run's actors: one table with the implementation, number, hosts, start and end of each role. Pure.

An actor's name is ROLE/INDEX. Plans and logs list the actors in the order of the table, the controller first.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["head", "ranks", "engines", "beside engines", "free cores"]
"""Rule that chooses the hosts of a role (launcher/common/placement.py). Any role may have "head", the first host, or
"free cores", the hosts with most cores free. "ranks" is the learner's rule, "engines" the rollouters', and
"beside engines" that of episode hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The facts that are particular to one role."""

    implementation: str
    """MODULE:CLASS of the actor."""
    drain_rank: int
    """Position in the order of the run's end, from 1: the actors of a rank end once all actors of lower ranks have."""
    number: str = ""
    """Key or property of the configuration that holds the number of its actors; empty if there is always one."""
    place: Place = "head"
    """Rule that chooses the hosts of its actors."""
    reads_model: bool = False
    """Whether its host needs the model's folder."""
    reads_tokenizer: bool = False
    """Whether its actors load the tokenizer."""
    rank_group: bool = False
    """Whether its actors compute together. When one dies, all are restarted, so no new actor meets an old one."""
    replicated: bool = False
    """Whether its actors all do the same work. The run continues with those that are left."""
    optional: bool = False
    """Whether the run continues even without all of its actors, for any cause of their end. Such a role is replicated
    too."""
    fixed: bool = False
    """Whether its actor keeps one address and one key for the whole run. A successor takes over both."""

    def load(self) -> Any:
        """Import the class of the actor and return it."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)


ROLES: dict[str, Role] = {
    "controller": Role(implementation="asyncrl.controller.actor:Controller", drain_rank=5, fixed=True),
    "dataloader": Role(
        implementation="asyncrl.dataloader.actor:Dataloader", drain_rank=2, reads_model=True, reads_tokenizer=True
    ),
    "reward": Role(
        implementation="asyncrl.reward.actor:RewardActor",
        drain_rank=1,
        number="reward.pools",
        place="free cores",
        replicated=True,
    ),
    "parameter_server": Role(implementation="asyncrl.parameter_server.actor:ParameterServer", drain_rank=2),
    "learner": Role(
        implementation="asyncrl.learner.actor:Learner",
        drain_rank=3,
        number="learner.ranks",
        place="ranks",
        reads_model=True,
        rank_group=True,
    ),
    "rollouter": Role(
        implementation="asyncrl.rollouter.actor:Rollouter",
        drain_rank=1,
        number="rollout.replicas",
        place="engines",
        reads_model=True,
        reads_tokenizer=True,
        replicated=True,
    ),
    # Episode hosts end after the rollouters, whose last episodes they play.
    "episodes": Role(
        implementation="asyncrl.episodes.actor:EpisodesActor",
        drain_rank=2,
        number="episode_hosts",
        place="beside engines",
        replicated=True,
    ),
    # Sinks end after the learner, whose last metrics they export.
    "sinks": Role(
        implementation="asyncrl.observe.sinks.actor:Sinks",
        drain_rank=4,
        number="sinks.are_wanted",
        replicated=True,
        optional=True,
    ),
}


def role_of(name: str) -> str:
    """Return the role in an actor's name, ROLE/INDEX."""
    return name.partition("/")[0]


def drain_rank(name: str) -> int:
    """Return the position of an actor in the order of the run's end (Role.drain_rank)."""
    return ROLES[role_of(name)].drain_rank


def rank_group_of(name: str) -> str:
    """Return an actor's role if its actors die and start together (Role.rank_group); else an empty string."""
    role = ROLES.get(role_of(name))
    return role_of(name) if role is not None and role.rank_group else ""


def is_replicated(name: str) -> bool:
    """Whether the run continues without an actor while others of its role are left."""
    role = ROLES.get(role_of(name))
    return role is not None and role.replicated


def is_optional(name: str) -> bool:
    """Whether the run continues without an actor and without all others of its role."""
    role = ROLES.get(role_of(name))
    return role is not None and role.optional


def may_rest(name: str, *, is_healable: bool) -> bool:
    """Whether the run continues without an actor that has died too often to be restarted now.

    ``is_healable``: whether a later restart may still help, by the exit of its last process.
    """
    return is_optional(name) or (is_replicated(name) and is_healable)

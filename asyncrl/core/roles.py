"""Roles of a run's actors: the one table of each role's implementation, number, place, and part in start and end. Pure.

A role is the part of an actor's name before the slash, ROLE/INDEX. The order of the table is that of the actors in
plans and logs, the controller first.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["head", "ranks", "engines", "beside engines", "free cores"]
"""Hosts of a role, by the rules of launcher/common/placement.py. Any role may be on the head, or where most cores are
free; "ranks" is the learner's rule, by its GPUs or cores, "engines" the rollouters', "beside engines" that of episode
hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The facts that are particular to one role."""

    implementation: str
    """MODULE:CLASS of the actor."""
    drain_rank: int
    """Rank in the end of the run, from 1: the actors of a rank are told to end once all of the lower ranks have."""
    number: str = ""
    """Key or property of the configuration that holds the number of its actors; empty for one."""
    place: Place = "head"
    """Hosts of its actors."""
    reads_model: bool = False
    """Whether its host needs the model's folder."""
    reads_tokenizer: bool = False
    """Whether its actors load the tokenizer."""
    gang: bool = False
    """Whether its actors compute together: when one dies all are started again, so that new ones meet new ones."""
    replicated: bool = False
    """Whether each does the same work: a run goes on with those that are left."""
    optional: bool = False
    """Whether a run goes on without any, whatever they ended of; these are replicated too."""
    fixed: bool = False
    """Whether it is found at one address with one key for the whole run, so its successor takes over both."""

    def load(self) -> Any:
        """The class of the actor, imported now."""
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
        gang=True,
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
    # After the rollouters, whose last episodes these play.
    "episodes": Role(
        implementation="asyncrl.episodes.actor:EpisodesActor",
        drain_rank=2,
        number="episode_hosts",
        place="beside engines",
        replicated=True,
    ),
    # After the learner, whose last metrics these bring out.
    "sinks": Role(
        implementation="asyncrl.observe.sinks.actor:Sinks",
        drain_rank=4,
        number="sinks.are_wanted",
        replicated=True,
        optional=True,
    ),
}


def role_of(name: str) -> str:
    """The role in an actor's name, ROLE/INDEX."""
    return name.partition("/")[0]


def drain_rank(name: str) -> int:
    """The drain rank of an actor."""
    return ROLES[role_of(name)].drain_rank


def gang_of(name: str) -> str:
    """The role with all of whose actors this one dies and starts; empty for one that does so alone."""
    role = ROLES.get(role_of(name))
    return role_of(name) if role is not None and role.gang else ""


def is_replicated(name: str) -> bool:
    """Whether a run goes on without an actor as long as there are others of its role."""
    role = ROLES.get(role_of(name))
    return role is not None and role.replicated


def is_optional(name: str) -> bool:
    """Whether a run goes on without an actor and all others of its role."""
    role = ROLES.get(role_of(name))
    return role is not None and role.optional


def is_set_aside(name: str, *, is_healable: bool) -> bool:
    """Whether a run may go on without an actor that is given up after an exit that a restart may mend, or may not."""
    return is_optional(name) or (is_replicated(name) and is_healable)

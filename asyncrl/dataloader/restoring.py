"""Rebuilds the book of leases from the learner's ledger, the rollouters' answers and the data. Pure.

Invariant: what comes out depends on the learner's word, the prompts and what is held, and on nothing that a dataloader
remembers but leases that are still on their way, and deaths. So a dataloader that has started again, and one whose
learner went back to an earlier state, do the same.

Fails with RunChanged when the ledger speaks of other prompts, or of another order, and that is not allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asyncrl.core.errors import InvalidRequest, RunChanged
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.evals import EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate, PromptQueue, WorkingLimit
from asyncrl.dataloader.lease_book import LeaseBook
from asyncrl.messages.dataloader import LeasesHeld, Restored
from asyncrl.messages.ledger import Ledger, position_of


@dataclass(frozen=True, slots=True)
class RestoreInputs:
    """The facts that follow from the configuration and the data."""

    order: EpochOrder
    oversize: frozenset[int]
    evals: tuple[EvalSet, ...]
    groups_per_version: int
    max_attempts: int
    may_change: Collection[str] = ()
    """Things that may change, of data, seed and batch: resume.allow."""


@dataclass(frozen=True, slots=True)
class RollouterAnswer:
    """The leases that a rollouter says it holds."""

    incarnation: int
    held: LeasesHeld


def check_unchanged(source: RestoreInputs, request: Restored) -> None:
    """Check that prompts and seed are unchanged, or may change. Raises RunChanged."""
    order = source.order
    if _is_other_data(source, request) and "data" not in source.may_change:
        raise RunChanged(
            "data",
            "the prompts differ",
            was=_prompts(request.prompts, request.fingerprint),
            now=_prompts(order.size, order.fingerprint),
        )
    if request.seed not in (-1, order.seed) and "seed" not in source.may_change:
        raise RunChanged("seed", "run.seed differs", was=str(request.seed), now=str(order.seed))


def rebuild(
    source: RestoreInputs,
    limit: WorkingLimit,
    request: Restored,
    answers: Mapping[str, RollouterAnswer],
    previous: LeaseBook | None,
    supply_number: int,
) -> LeaseBook:
    """The book that stands where ``request`` says the run does; ``previous`` is left as it is.

    ``answers`` are of all living rollouters, by name. Raises InvalidRequest on what is no ledger. May take a second for
    a million prompts.
    """
    try:
        ledger = Ledger.restore(request.ledger)
    except ValueError as error:
        raise InvalidRequest(f"where the run stands cannot be read: {error}") from error
    if _is_other_data(source, request):
        # The old uids name other prompts here, so the new data begins with an epoch that no uid has.
        ledger.first_epoch = _next_epoch(ledger, request.claims)
    trained = ledger.count("trained")
    gate = Gate(
        limit,
        groups_per_version=source.groups_per_version,
        groups_left=request.groups_left,
        first_version=request.version,
        trained=trained,
        trained_at_version=request.trained_at_version,
    )
    evals = EvalRounds(
        source.evals,
        request.version,
        closed=request.rounds_closed,
        open={round.name: round.held for round in request.rounds_open},
        # A learner that begins again with nothing trained publishes a number above 0 and has passed no version by it.
        overdue=trained > 0,
    )
    if request.finished:
        gate.finished = True
        evals.finish(request.version)
    book = LeaseBook(
        PromptQueue(source.order, ledger, source.oversize),
        gate,
        evals,
        max_attempts=source.max_attempts,
        number=request.outcomes_number,
        supply_number=supply_number,
    )
    if previous is not None:
        book.recall_calls(previous)
    for uid in request.claims:
        book.claim(uid)
    for name, answer in answers.items():
        book.adopt(name, answer.incarnation, answer.held, previous)
    return book


def _prompts(count: int, fingerprint: str) -> str:
    return (f"{count:,} prompts with " if count else "") + f"the fingerprint {fingerprint}"


def _is_other_data(source: RestoreInputs, request: Restored) -> bool:
    return request.fingerprint not in ("", source.order.fingerprint)


def _next_epoch(ledger: Ledger, claims: Collection[str]) -> int:
    """The first epoch without any prompt that the learner knows."""
    return max([ledger.first_epoch, ledger.next_epoch, *(position_of(uid)[0] + 1 for uid in claims)])

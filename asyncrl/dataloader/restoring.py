"""Rebuilds the book of leases from the learner's ledger, the rollouters' answers and the data. Pure.

Invariant: the book depends on the learner's state, the prompts and the leases that rollouters hold. From the previous
book it takes only deaths, counts, numbers of requests and leases, and leases that are still on their way. So a
restarted dataloader, and one whose learner went back to an earlier state, build the same book, but for these.

Fails with RunChanged when the ledger is of other prompts, or of another order, and ``resume.allow`` does not allow it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from asyncrl.config import Config
from asyncrl.core.death_counts import runs_alone
from asyncrl.core.errors import InvalidRequest, RunChanged
from asyncrl.dataloader.curriculum import Rests
from asyncrl.dataloader.evals import EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate, WorkingLimit
from asyncrl.dataloader.lease_book import Ask, LeaseBook
from asyncrl.dataloader.prompt_queue import PromptQueue, PromptSource, growths
from asyncrl.messages.dataloader import LeasesHeld, Restored, Resumed
from asyncrl.messages.ledger import Growth, Ledger, position_of


@dataclass(frozen=True, slots=True)
class RollouterAnswer:
    """The leases that a rollouter says it holds, with the incarnation that answered."""

    incarnation: int
    held: LeasesHeld


class Restorer:
    """Rebuilds the book over the sources of the training prompts; ``rests`` is the curriculum."""

    def __init__(
        self, config: Config, sources: Sequence[PromptSource], evals: Sequence[EvalSet] = (), rests: Rests | None = None
    ) -> None:
        self._config, self._sources, self._evals, self._rests = config, sources, evals, rests
        self.seed = sources[0].order.seed
        self._limit = WorkingLimit(
            groups_per_step=config.learner.groups_per_step,
            groups_per_version=config.groups_per_version,
            staleness_max=config.staleness.max,
            adapt=config.staleness.adapt,
        )
        """The staleness limit of all books: a restore does not reset it."""

    def check_unchanged(self, request: Restored) -> None:
        """Check that prompts and seed are unchanged, or may change. Raises RunChanged.

        The request of a new run has the fingerprint "" and the seed -1, which fit all prompts and seeds.
        """
        may_change = self._config.resume.allow
        if self._is_other_data(request) and "data" not in may_change:
            fingerprint, prompts = self.identity(self._sizes(request))
            raise RunChanged(
                "data",
                "the prompts differ",
                was=_prompts(request.prompts, request.fingerprint),
                now=_prompts(prompts, fingerprint),
            )
        if request.seed not in (-1, self.seed) and "seed" not in may_change:
            raise RunChanged("seed", "run.seed differs", was=str(request.seed), now=str(self.seed))

    def identity(self, grown: Sequence[Growth]) -> tuple[str, int]:
        """Fingerprint and number of the prompts of the run. A source in ``grown`` counts with its first size there."""
        found: list[tuple[float, str]] = []
        prompts = 0
        for number, source in enumerate(self._sources):
            size, fingerprint = source.order.size, source.order.fingerprint
            known = growths(grown, number, len(self._sources)) if source.prefix is not None else []
            if known and source.prefix is not None and known[0].prompts <= size:
                size, fingerprint = known[0].prompts, source.prefix(known[0].prompts)
            found.append((source.weight, fingerprint))
            prompts += size
        return fingerprint_of_mixture(found), prompts

    def rebuild(
        self,
        request: Restored,
        answers: Mapping[str, RollouterAnswer],
        previous: LeaseBook | None,
        status_number: int,
    ) -> LeaseBook:
        """Build the book for the state of the run in ``request``; ``previous`` is not changed.

        ``answers`` maps the name of each rollouter that has answered to its leases. Raises InvalidRequest if the ledger
        cannot be read. May take a second for a million prompts.
        """
        try:
            ledger = Ledger.restore(request.ledger, len(self._sources))
        except ValueError as error:
            raise InvalidRequest(f"where the run stands cannot be read: {error}") from error
        if self._is_other_data(request):
            # Old uids would name other prompts of the new data, so the new data begins with an epoch that no uid has.
            ledger.begin(_next_epoch(ledger, request.claims))
            ledger.grown = []
        else:
            ledger.grown = self._sizes(request)
        trained = ledger.count("trained")
        gate = Gate(
            self._limit,
            groups_per_version=self._config.groups_per_version,
            groups_left=request.groups_left,
            first_version=request.version,
            trained=trained,
            trained_at_version=request.trained_at_version,
        )
        evals = EvalRounds(
            self._evals,
            request.version,
            closed=request.rounds_closed,
            open={round.name: round.held for round in request.rounds_open},
            # A restarted learner that has trained nothing publishes a version above 0, but has passed no multiple of
            # ``every_versions``.
            overdue=trained > 0,
        )
        if request.finished:
            gate.finished = True
            evals.finish(request.version)
        book = LeaseBook(
            PromptQueue(self._sources, ledger, self._rests),
            gate,
            evals,
            max_attempts=self._config.rollout.max_attempts,
            number=request.outcomes_number,
            status_number=status_number,
        )
        if previous is not None:
            # A request may be parked, or arrive again. If its rollouter does not answer, its lease numbers are unknown.
            # A copy of an answered request would get a number that the rollouter has seen: the prompt would be lost.
            book.counts.update(previous.counts)
            book.newest_call, book.answered_call = dict(previous.newest_call), dict(previous.answered_call)
        for uid in request.claims:
            book.hold(uid)
        for name, answer in answers.items():
            adopt(book, name, answer, previous)
        # After the leases are known: an epoch that has begun keeps its size.
        book.grow()
        return book

    def resumed(self, book: LeaseBook) -> Resumed:
        """The learner's answer, once the gate is open with this book."""
        fingerprint, prompts = self.identity(book.ledger.grown)
        return Resumed(
            fingerprint=fingerprint,
            seed=self.seed,
            limit=book.gate.limit.versions,
            first_epoch=book.ledger.first_epoch,
            prompts=prompts,
        )

    def _is_other_data(self, request: Restored) -> bool:
        """Whether the prompts are others than those of the ledger. Appended rows of a growing file are no others."""
        sizes = self._sizes(request)
        if request.fingerprint not in ("", self.identity(sizes)[0]):
            return True
        return any(self._has_changed(each) for each in sizes)

    def _sizes(self, request: Restored) -> list[Growth]:
        """Return the sizes in the ledger. For a single file that the run did not follow before, return its old size."""
        first, *others = self._sources
        if request.ledger.grown or others or first.prefix is None or not request.prompts:
            return request.ledger.grown
        return [Growth(request.ledger.first_epoch, request.prompts, request.fingerprint)]

    def _has_changed(self, growth: Growth) -> bool:
        """Whether the first rows of a growing file are fewer than ``growth`` says, or others."""
        source = self._sources[growth.epoch % len(self._sources)]
        if source.prefix is None:
            return False
        return growth.prompts > source.order.size or source.prefix(growth.prompts) != growth.fingerprint


def adopt(book: LeaseBook, rollouter: str, answer: RollouterAnswer, previous: LeaseBook | None) -> None:
    """Record the leases that a rollouter says it holds.

    Unless the rollouter leaves, it also keeps the leases of ``previous`` that may still be on their way to it. Prompts
    that the learner or another rollouter was recorded with before stay with that holder.
    """
    held, uids = answer.held, frozenset(answer.held.attempts)
    holder = book.meet(Ask(rollouter, answer.incarnation, held.seen, 0, held.served_version, uids))
    for index, (uid, attempt) in enumerate(held.attempts.items()):
        # A received lease is not repeated, so it needs no valid number: it gets an unused negative one. A prompt may
        # have reached ALONE_FROM deaths by deaths of the rollouter's engine while the rollouter holds other prompts:
        # then it does not run alone.
        alone = runs_alone(attempt) and len(uids) == 1
        book.hold(uid, rollouter, number=-1 - index, attempt=attempt, alone=alone)
    known = previous.rollouters.get(rollouter) if previous is not None else None
    if held.leaving:
        book.leaving.add(rollouter)
    elif known is not None and known.incarnation == answer.incarnation:
        # Leases up to this number may still be on their way, and no number may be used twice.
        holder.last_number = max(holder.last_number, known.last_number)
        for number, lease in known.leases.items():
            if number > held.seen:
                book.hold(lease.prompt.uid, rollouter, number=number, attempt=lease.attempt, alone=lease.alone)


def missing(book: LeaseBook, previous: LeaseBook) -> list[str]:
    """Uids of the prompts that were out in ``previous``, are not out in ``book`` and have no outcome."""
    return [uid for uid in previous.out if uid not in book.out and book.is_open(uid)]


def inherit(book: LeaseBook, previous: LeaseBook) -> None:
    """Add the deaths that only ``previous`` knows, once all prompts that are out are known.

    A suspect of ``previous`` that is not out in ``book`` was not delivered, so the death of its holder counts now.
    """
    for uid, attempt in previous.ledger.attempts.items():
        if book.is_open(uid):
            book.suspects.deaths.raise_to(uid, attempt)
    for held in [previous.out[uid] for uid in missing(book, previous)]:
        if held.suspect:
            book.suspects.deaths.died(held.prompt.uid, alone=held.alone)


def fingerprint_of_mixture(sources: Sequence[tuple[float, str]]) -> str:
    """Fingerprint of sources with these weights and fingerprints, in order; a single source keeps its own."""
    if len(sources) == 1:
        return sources[0][1]
    text = "".join(f"{Fraction(str(weight))} {fingerprint}\n" for weight, fingerprint in sources)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _prompts(count: int, fingerprint: str) -> str:
    return (f"{count:,} prompts with " if count else "") + f"the fingerprint {fingerprint}"


def _next_epoch(ledger: Ledger, claims: Collection[str]) -> int:
    """The first epoch without any prompt that the learner knows, of the first source."""
    epoch = max([ledger.first_epoch, ledger.next_epoch, *(epoch + 1 for epoch, _ in map(position_of, claims))])
    return -(-epoch // ledger.number_of_sources) * ledger.number_of_sources

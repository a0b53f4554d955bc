"""Rebuilds the book of leases from the learner's ledger, the rollouters' answers and the data. Pure.

Invariant: the book depends on the learner's state, the prompts and the leases that rollouters hold. From the previous
book it takes only deaths, numbers of requests, and leases that are still on their way. So a restarted dataloader, and
one whose learner went back to an earlier state, build the same book.

Fails with RunChanged when the ledger is of other prompts, or of another order, and ``resume.allow`` does not allow it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.core.errors import InvalidRequest, RunChanged
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.evals import EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate, PromptQueue, WorkingLimit
from asyncrl.dataloader.lease_book import LeaseBook
from asyncrl.messages.dataloader import LeasesHeld, Restored
from asyncrl.messages.ledger import Ledger, position_of


@dataclass(frozen=True, slots=True)
class RollouterAnswer:
    """The leases that a rollouter says it holds, with the incarnation that answered."""

    incarnation: int
    held: LeasesHeld


class Restorer:
    """Rebuilds the book over one order of the training prompts; ``oversize`` are those that are never leased."""

    def __init__(
        self, config: Config, order: EpochOrder, oversize: Collection[int] = (), evals: Sequence[EvalSet] = ()
    ) -> None:
        self.order = order
        self._config, self._oversize, self._evals = config, frozenset(oversize), evals
        self._limit = WorkingLimit(
            groups_per_step=config.learner.groups_per_step,
            groups_per_version=config.groups_per_version,
            staleness_max=config.staleness.max,
            adapt=config.staleness.adapt,
        )
        """The staleness limit of all books: a restore does not reset it."""

    def check_unchanged(self, request: Restored) -> None:
        """Check that prompts and seed are unchanged, or may change. A new run has neither yet. Raises RunChanged."""
        order, may_change = self.order, self._config.resume.allow
        if self._is_other_data(request) and "data" not in may_change:
            raise RunChanged(
                "data",
                "the prompts differ",
                was=_prompts(request.prompts, request.fingerprint),
                now=_prompts(order.size, order.fingerprint),
            )
        if request.seed not in (-1, order.seed) and "seed" not in may_change:
            raise RunChanged("seed", "run.seed differs", was=str(request.seed), now=str(order.seed))

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
            ledger = Ledger.restore(request.ledger)
        except ValueError as error:
            raise InvalidRequest(f"where the run stands cannot be read: {error}") from error
        if self._is_other_data(request):
            # Old uids would name other prompts of the new data, so the new data begins with an epoch that no uid has.
            ledger.first_epoch = _next_epoch(ledger, request.claims)
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
            PromptQueue(self.order, ledger, self._oversize),
            gate,
            evals,
            max_attempts=self._config.rollout.max_attempts,
            number=request.outcomes_number,
            status_number=status_number,
        )
        if previous is not None:
            book.recall_calls(previous)
        for uid in request.claims:
            book.claim(uid)
        for name, answer in answers.items():
            book.adopt(name, answer.incarnation, answer.held, previous)
        return book

    def _is_other_data(self, request: Restored) -> bool:
        return request.fingerprint not in ("", self.order.fingerprint)


def _prompts(count: int, fingerprint: str) -> str:
    return (f"{count:,} prompts with " if count else "") + f"the fingerprint {fingerprint}"


def _next_epoch(ledger: Ledger, claims: Collection[str]) -> int:
    """The first epoch without any prompt that the learner knows."""
    return max([ledger.first_epoch, ledger.next_epoch, *(epoch + 1 for epoch, _ in map(position_of, claims))])

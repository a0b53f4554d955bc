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
from asyncrl.data.mixture import fingerprint_of_mixture
from asyncrl.dataloader.curriculum import Rests
from asyncrl.dataloader.evals import EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate, WorkingLimit
from asyncrl.dataloader.lease_book import LeaseBook
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
        """Check that prompts and seed are unchanged, or may change. A new run has neither yet. Raises RunChanged."""
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
        """Fingerprint and number of the prompts of the run; of a source that has ``grown``, those at its start."""
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
            book.recall_calls(previous)
        for uid in request.claims:
            book.claim(uid)
        for name, answer in answers.items():
            book.adopt(name, answer.incarnation, answer.held, previous)
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
        """LedgerState.grown; for a file that the run did not follow before, with the prompts that it had."""
        first, *others = self._sources
        if request.ledger.grown or others or first.prefix is None or not request.prompts:
            return request.ledger.grown
        return [Growth(request.ledger.first_epoch, request.prompts, request.fingerprint)]

    def _has_changed(self, growth: Growth) -> bool:
        source = self._sources[growth.epoch % len(self._sources)]
        if source.prefix is None:
            return False
        return growth.prompts > source.order.size or source.prefix(growth.prompts) != growth.fingerprint


def _prompts(count: int, fingerprint: str) -> str:
    return (f"{count:,} prompts with " if count else "") + f"the fingerprint {fingerprint}"


def _next_epoch(ledger: Ledger, claims: Collection[str]) -> int:
    """The first epoch without any prompt that the learner knows, of the first source."""
    epoch = max([ledger.first_epoch, ledger.next_epoch, *(epoch + 1 for epoch, _ in map(position_of, claims))])
    return -(-epoch // ledger.number_of_sources) * ledger.number_of_sources

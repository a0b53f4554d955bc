"""Gate and order against a model of the loop. Deaths and losses are in test_exactly_once_model.

The model holds the truth: what each rollouter really received and serves, what the learner really holds and has
trained. Replies and reports may be lost, leases come back, and one rollouter may die, so that no prompt is suspect of
that. A lease is checked against the truth, not against the book's own counters; and from every state reached, a fair
continuation must end the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from draws import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.evals import EvalRounds
from asyncrl.dataloader.gate import Gate, WorkingLimit
from asyncrl.dataloader.lease_book import Ask, LeaseBook, PromptLease
from asyncrl.dataloader.prompt_queue import PromptQueue, PromptSource
from asyncrl.messages.dataloader import Outcome, Outcomes
from asyncrl.messages.ledger import Ledger

SIGNAL = ("trained", "trained", "trained", "filtered", "quarantined")


@dataclass
class Rollouter:
    """Truth about a rollouter."""

    name: str
    incarnation: int = 1
    seen: int = 0
    served: int = 0
    holding: list[str] = field(default_factory=list)


class Loop(RuleBasedStateMachine):
    """The whole loop."""

    @initialize(
        step=st.integers(1, 3),
        steps_per_version=st.integers(1, 2),
        versions=st.integers(1, 4),
        staleness_max=st.integers(0, 3),
        adapt=st.booleans(),
        replicas=st.integers(1, 3),
        size=st.integers(2, 7),
        oversize=st.sampled_from([frozenset(), frozenset({0})]),
        in_order=st.booleans(),
    )
    def start(
        self,
        step: int,
        steps_per_version: int,
        versions: int,
        staleness_max: int,
        adapt: bool,
        replicas: int,
        size: int,
        oversize: frozenset[int],
        in_order: bool,
    ) -> None:
        self.per_step, self.steps_per_version, self.per_version = step, steps_per_version, step * steps_per_version
        self.steps, self.groups = versions * steps_per_version, versions * self.per_version
        self.staleness_max, self.oversize, self.in_order = staleness_max, oversize, in_order
        limit = WorkingLimit(
            groups_per_step=step, groups_per_version=self.per_version, staleness_max=staleness_max, adapt=adapt
        )
        gate = Gate(limit, groups_per_version=self.per_version, groups_left=self.groups)
        self.order = EpochOrder("model", 0, size)
        self.leases = LeaseBook(
            PromptQueue([PromptSource(self.order, oversize)], Ledger()), gate, EvalRounds(()), max_attempts=3
        )
        self.rollouters = [Rollouter(f"rollouter/{i}") for i in range(replicas)]

        # The learner.
        self.buffered: set[str] = set()
        self.in_training: set[str] = set()
        self.concluded: dict[str, str] = {}
        self.trained_at = {0: 0}
        self.step = 0
        self.waited = False
        self.pending: list[Outcome] = []
        self.signal: dict[str, Any] = {}
        self.report: Outcomes | None = None

        # Facts that an observer of leases and outcomes knows.
        self.out: set[str] = set()
        """Leased, and neither reported nor taken back."""
        self.returned: set[str] = set()
        self.position = 0
        self.reported_trained = 0
        self.leased_under: dict[str, int] = {}
        """Version really served at the last lease of each uid, in the order of these."""

    @property
    def version(self) -> int:
        return max(self.trained_at)

    @property
    def trained(self) -> int:
        return sum(kind == "trained" for kind in self.concluded.values())

    # --- rollouters ---

    def send(self, rollouter: Rollouter, free_groups: int, *, received: bool = True) -> None:
        who = (rollouter.name, rollouter.incarnation)
        ask = Ask(*who, rollouter.seen, free_groups, rollouter.served, frozenset(rollouter.holding))
        newest_known = self.leases.gate.newest_version
        self.leases.meet(ask)
        before, limit_groups = len(self.out), round(self.leases.gate.limit.versions * self.per_version)
        leases = self.leases.take(ask)
        assert len(leases) <= free_groups
        for lease in leases:
            # One that is out is given again, since its reply was lost.
            if lease.prompt.uid not in self.out:
                self.check_new_lease(ask, lease)
        if len(self.out) > before:
            known = max(version for version in self.trained_at if version <= min(ask.served_version, newest_known))
            room = self.trained_at[known] + limit_groups + self.per_version - self.reported_trained
            assert len(self.out) <= room
        if received:
            for lease in leases:
                assert lease.number > rollouter.seen
                rollouter.seen = lease.number
                rollouter.holding.append(lease.prompt.uid)

    def check_new_lease(self, ask: Ask, lease: PromptLease) -> None:
        uid = lease.prompt.uid
        if uid in self.returned:
            self.returned.remove(uid)
        else:
            assert not self.returned, "what came back goes first"
            assert uid == self.next_in_order()
        self.out.add(uid)
        self.leased_under.pop(uid, None)
        self.leased_under[uid] = ask.served_version
        # The bound, in what is really trained and really still to be.
        admitted = self.trained_at[ask.served_version] + (self.staleness_max + 1) * self.per_version
        assert self.trained + len(self.out - set(self.concluded)) <= admitted
        assert self.reported_trained + len(self.out) <= self.groups

    def next_in_order(self) -> str:
        while True:
            epoch, index = self.order.at(self.position)
            self.position += 1
            if index not in self.oversize:
                return f"{epoch}-{index}"

    @rule(data=st.data(), free_groups=st.integers(1, 5), received=st.sampled_from([True, True, False]))
    def lease(self, data: st.DataObject, free_groups: int, received: bool) -> None:
        self.send(data.draw(st.sampled_from(self.rollouters)), free_groups, received=received)

    def deliver_many(self, kinds: list[str]) -> None:
        for rollouter in self.rollouters:
            for uid, kind in zip(list(rollouter.holding), kinds, strict=False):
                self.take_delivery(uid, kind)
                rollouter.holding.remove(uid)

    @precondition(lambda self: any(r.holding for r in self.rollouters))
    @rule(data=st.data(), kind=st.sampled_from([*SIGNAL, "returned"]))
    def deliver_one(self, data: st.DataObject, kind: str) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.holding]))
        uid = data.draw(st.sampled_from(rollouter.holding))
        rollouter.holding.remove(uid)
        if kind != "returned":
            self.take_delivery(uid, kind)
        else:
            self.leases.give_back(rollouter.name, rollouter.incarnation, [uid])
            self.out.remove(uid)
            self.returned.add(uid)

    @precondition(lambda self: all(r.incarnation == 1 for r in self.rollouters))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        rollouter = data.draw(st.sampled_from(self.rollouters))
        self.leases.died(rollouter.name, 1)
        orphans = self.leases.orphans
        self.leases.settle(orphans, list(filter(self.has, orphans)))
        lost = {uid for uid in orphans if not self.has(uid)}
        self.out -= lost
        self.returned |= lost
        rollouter.incarnation, rollouter.seen, rollouter.holding = 2, 0, []

    @precondition(lambda self: any(r.served < self.version for r in self.rollouters))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.served < self.version]))
        rollouter.served = data.draw(st.integers(rollouter.served + 1, self.version))

    # --- the learner ---

    def has(self, uid: str) -> bool:
        return uid in self.buffered or uid in self.in_training or uid in self.concluded

    def take_delivery(self, uid: str, kind: str) -> None:
        if kind == "trained":
            self.buffered.add(uid)
        else:
            self.conclude(uid, kind)

    def conclude(self, uid: str, kind: str) -> None:
        self.concluded[uid] = kind
        self.pending.append(Outcome(uid, kind))

    def can_begin(self) -> bool:
        if self.in_training or self.step == self.steps or len(self.buffered) < self.per_step:
            return False
        return bool(self.next_batch()) and self.next_batch() <= self.buffered

    def next_batch(self) -> set[str]:
        """The groups that were leased first: of the outstanding ones, if ``in_order``, else of those delivered."""
        among = (self.out - set(self.concluded)) | self.buffered if self.in_order else self.buffered
        return set([uid for uid in self.leased_under if uid in among][: self.per_step])

    @precondition(lambda self: self.in_training or self.can_begin())
    @rule(halfway=st.booleans())
    def train(self, halfway: bool) -> None:
        """Half a step or a whole one."""
        if not self.in_training:
            self.in_training = self.next_batch()
            self.buffered -= self.in_training
            if self.in_order:
                assert all(self.version - self.leased_under[uid] <= self.staleness_max for uid in self.in_training)
            self.signal = {"step_began": True, "buffered_groups": len(self.buffered), "waited": self.waited}
            if halfway:
                return
        for uid in sorted(self.in_training):
            self.conclude(uid, "trained")
        self.in_training = set()
        self.step += 1
        self.waited = not self.can_begin()
        if self.step % self.steps_per_version == 0:
            self.trained_at[self.version + 1] = self.trained

    @rule(acknowledged=st.sampled_from([True, True, False]))
    def send_report(self, acknowledged: bool = True) -> None:
        """The present report, again if its acknowledgement was lost; a new one otherwise."""
        for rejected in self.leases.status.rejected:
            if rejected.uid not in self.concluded:
                self.conclude(rejected.uid, rejected.kind)
        if self.report is None:
            self.report = Outcomes(
                number=self.leases.number + 1,
                version=self.version,
                trained_at_version=self.trained_at[self.version],
                outcomes=self.pending,
                finished=self.step == self.steps,
                **self.signal,
            )
            self.pending, self.signal = [], {}
            self.reported_trained += sum(outcome.kind == "trained" for outcome in self.report.outcomes)
            self.out -= {outcome.uid for outcome in self.report.outcomes}
        assert self.leases.report(self.report) == self.report.number
        if acknowledged:
            self.report = None

    @rule(kinds=st.lists(st.sampled_from(SIGNAL), min_size=1, max_size=8), lag=st.integers(0, 2))
    def move_on(self, kinds: list[str], lag: int) -> None:
        """The usual events between two steps; they bring the run forward."""
        for rollouter in self.rollouters:
            rollouter.served = max(rollouter.served, self.version - lag)
            self.send(rollouter, 4)
        self.deliver_many(kinds)
        if self.in_training or self.can_begin():
            self.train(halfway=False)
        self.send_report()

    @invariant()
    def the_supply_counts_outstanding_groups_and_ends_when_none_are_left(self) -> None:
        if hasattr(self, "leased_under"):
            status = self.leases.status
            assert status.outstanding == self.leases.outstanding == len(self.out)
            left = self.groups - self.reported_trained - len(self.out)
            assert status.exhausted == (self.leases.closed or left <= 0)

    def teardown(self) -> None:
        """From wherever this ended, a fair continuation ends the run in a bounded number of rounds."""
        if not hasattr(self, "leased_under"):
            return
        for _ in range(20 + 2 * self.groups):
            self.send_report()
            self.send_report()
            for rollouter in self.rollouters:
                rollouter.served = self.version
                self.send(rollouter, 2)
            self.deliver_many(["trained"] * self.groups)
            while self.in_training or self.can_begin():
                self.train(halfway=False)
        assert self.leases.closed, "the loop does not end"
        assert self.trained == self.groups


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)

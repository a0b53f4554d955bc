"""Gate and tickets against a model of the whole loop, in any order of events.

The model holds the truth: what each rollouter really received and serves, what the learner really holds and has
trained. Messages between them and the ticket book may be lost, repeated and late. What is granted is checked against
the truth, not against the book's own counters; and from every state reached, a fair continuation must end the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import structlog
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from services import services

from asyncrl.data.order import EpochOrder
from asyncrl.dataloader.evals import EvalPrompt, EvalRounds, EvalSet
from asyncrl.dataloader.gate import Gate
from asyncrl.dataloader.holders import Ask, Grant
from asyncrl.dataloader.limit import WorkingLimit
from asyncrl.dataloader.prompt_queue import PromptQueue, TrainingPrompt
from asyncrl.dataloader.suspects import ALONE_FROM
from asyncrl.dataloader.tickets import Tickets
from asyncrl.learner.groups.buffer import GroupBuffer
from asyncrl.learner.groups.stragglers import Stragglers
from asyncrl.ledger import Ledger, position_of
from asyncrl.messages.dataloader import GrantsOpen, OpenGrant, Outcome, Outcomes
from asyncrl.messages.groups import Group, VersionSpan

SIGNAL = ("trained", "trained", "trained", "filtered", "quarantined")


@dataclass
class Rollouter:
    """What a rollouter really knows."""

    name: str
    incarnation: int = 1
    seen: int = 0
    served: int = 0
    holding: dict[str, Grant] = field(default_factory=dict)
    generated: set[str] = field(default_factory=set)
    """Of what it holds: delivered at least once, so nothing runs for it, whether or not it was acknowledged."""
    asks: list[Ask] = field(default_factory=list)
    """All that were ever sent: any may arrive again."""


def group_of(uid: str, version: int) -> Group:
    """As far as the choice of a step looks at it."""
    epoch, index = position_of(uid)
    trajectory = SimpleNamespace(sequences=[SimpleNamespace(spans=[VersionSpan(version, 0, 1)])])
    ticket = SimpleNamespace(uid=uid, epoch=epoch, index=index, param_version=version)
    return SimpleNamespace(ticket=ticket, trajectories=[trajectory])


class Loop(RuleBasedStateMachine):
    """The whole loop."""

    # --- the system ---

    @initialize(
        groups_per_step=st.integers(1, 3),
        steps_per_version=st.integers(1, 2),
        versions=st.integers(1, 4),
        staleness_max=st.integers(0, 3),
        adapt=st.booleans(),
        replicas=st.integers(1, 3),
        size=st.integers(1, 7),
        oversize=st.sets(st.integers(0, 6), max_size=3),
        learner=st.sampled_from(["any", "in order", "waits"]),
        no_signal=st.sampled_from([False, False, False, True]),
        suspects=st.one_of(st.just(set()), st.sets(st.integers(0, 6))),
        evals=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans(), st.booleans()), max_size=2),
    )
    def start(
        self,
        groups_per_step: int,
        steps_per_version: int,
        versions: int,
        staleness_max: int,
        adapt: bool,
        replicas: int,
        size: int,
        oversize: set[int],
        learner: str,
        no_signal: bool,
        suspects: set[int],
        evals: list[tuple[int, int, bool, bool]],
    ) -> None:
        self.groups_per_step = groups_per_step
        self.steps_per_version = steps_per_version
        self.steps = versions * steps_per_version
        self.per_version = groups_per_step * steps_per_version
        self.staleness_max = staleness_max
        self.size = size
        self.oversize = frozenset(index for index in oversize if index < size - 1)
        self.in_order, self.waits = learner == "in order", learner == "waits"
        self.no_signal = no_signal
        self.eval_sets = [
            EvalSet(f"set-{i}", tuple(range(n)), every, at_start, at_end)
            for i, (n, every, at_start, at_end) in enumerate(evals)
        ]
        working = WorkingLimit(
            groups_per_step=groups_per_step,
            groups_per_version=self.per_version,
            staleness_max=staleness_max,
            adapt=adapt,
        )
        gate = Gate(
            working,
            groups_per_version=self.per_version,
            groups_left=self.steps * groups_per_step,
        )
        self.order = EpochOrder("model", 0, size)
        ledger = Ledger()
        ledger.attempts = {f"0-{index}": ALONE_FROM for index in suspects}
        queue = PromptQueue(self.order, ledger, self.oversize)
        self.tickets = Tickets(queue, gate, EvalRounds(self.eval_sets), max_attempts=1_000_000)
        self.rollouters = [Rollouter(f"rollouter/{i}") for i in range(replicas)]

        # The learner.
        self.buffered: set[str] = set()
        self.in_training: set[str] = set()
        self.concluded: dict[str, str] = {}
        self.eval_held: dict[str, set[str]] = {}
        self.eval_closed: set[str] = set()
        self.trained_at = {0: 0}
        self.step = 0
        self.waited = False
        self.finished = False
        self.pending: list[Outcome] = []
        self.signal: tuple[int, bool] | None = None
        self.to_finish = False
        self.report: Outcomes | None = None
        self.report_number = 0
        self.reported_finished = False
        self.supply_seen = -1
        self.stragglers = Stragglers(
            SimpleNamespace(
                learner=SimpleNamespace(groups_per_step=groups_per_step, steps_per_version=steps_per_version),
                staleness=SimpleNamespace(max=staleness_max),
            ),
            self,
            self,
            services(clock=SimpleNamespace(now=lambda: 0.0), log=structlog.get_logger()),
        )

        # What an observer of grants and outcomes counts.
        self.holder: dict[str, tuple[str, int] | None] = {}
        """Who was granted a uid that is neither reported nor taken back; None once that one has died."""
        self.returned: set[str] = set()
        """Taken back from its holder, and neither granted again nor reported since."""
        self.position = 0
        self.reported: set[str] = set()
        self.reported_trained = 0
        self.granted_under: dict[str, int] = {}
        """Version really served at the last grant of each uid."""
        self.grant_order: dict[str, int] = {}
        self.numbers: dict[tuple[str, int], dict[int, str]] = {}
        self.asked: tuple[list[str], set[str]] | None = None
        """Orphans that the learner was asked about, and its answer, under way."""

    # --- the truth ---

    @property
    def version(self) -> int:
        return max(self.trained_at)

    @property
    def trained(self) -> int:
        return sum(kind == "trained" for kind in self.concluded.values())

    def is_eval(self, uid: str) -> bool:
        return "@" in uid

    def outstanding(self) -> set[str]:
        return {uid for uid in self.holder if not self.is_eval(uid)}

    def learner_has(self, uid: str) -> bool:
        if self.is_eval(uid):
            key = f"eval/{uid.rpartition('-')[0]}"
            return key in self.eval_closed or uid in self.eval_held.get(key, ())
        return uid in self.buffered or uid in self.in_training or uid in self.concluded

    # --- rollouters ---

    def current(self, rollouter: Rollouter, free_groups: int) -> Ask:
        return Ask(
            rollouter.name,
            rollouter.incarnation,
            rollouter.seen,
            free_groups,
            rollouter.served,
            frozenset(rollouter.holding),
        )

    def send(self, rollouter: Rollouter, ask: Ask, *, received: bool) -> list[Grant]:
        before = set(self.tickets.orphans)
        newest_known = self.tickets.newest_version
        self.tickets.meet(ask)
        for uid in set(self.tickets.orphans) - before:
            self.holder[uid] = None
        outstanding_before = len(self.outstanding())
        limit_groups = round(self.tickets.limit * self.per_version)
        grants = self.tickets.lease(ask)
        assert len(grants) <= ask.free_groups
        assert [g.number for g in grants] == sorted({g.number for g in grants})
        numbers = self.numbers.setdefault((ask.rollouter, ask.incarnation), {})
        new = 0
        for grant in grants:
            uid = grant.prompt.uid
            if grant.number in numbers:
                assert numbers[grant.number] == uid
                assert grant.number > ask.seen
                assert self.holder[uid] == (ask.rollouter, ask.incarnation)
                continue
            assert not numbers or grant.number == max(numbers) + 1
            assert grant.param_version == newest_known
            numbers[grant.number] = uid
            self.check_new_grant(ask, grant)
            self.check_alone(rollouter, ask, grant, grants)
            if isinstance(grant.prompt, TrainingPrompt):
                new += 1
        if new:
            known = max(v for v in self.trained_at if v <= min(ask.served_version, newest_known))
            room = self.trained_at[known] + limit_groups + self.per_version - self.reported_trained
            assert outstanding_before + new <= room
        if received and ask.incarnation == rollouter.incarnation:
            for grant in grants:
                assert grant.number > rollouter.seen
                rollouter.seen = grant.number
                rollouter.holding[grant.prompt.uid] = grant
        return grants

    def check_new_grant(self, ask: Ask, grant: Grant) -> None:
        uid = grant.prompt.uid
        assert uid not in self.holder, "granted to two"
        assert uid not in self.reported, "granted again although finished"
        self.holder[uid] = (ask.rollouter, ask.incarnation)
        if isinstance(grant.prompt, EvalPrompt):
            assert ask.served_version >= grant.prompt.version
            if grant.prompt.version:
                assert grant.prompt.version in self.trained_at
            return
        if uid in self.returned:
            self.returned.remove(uid)
        else:
            # Those that run alone have their own turn.
            attempts = self.tickets.supply.attempts
            if not grant.alone:
                assert all(attempts.get(other, 0) >= ALONE_FROM for other in self.returned), "what came back goes first"
            while (following := self.next_in_order()) != uid:
                assert attempts.get(following, 0) >= ALONE_FROM, "a prompt was left out"
                self.returned.add(following)
        # Places of those that wait to run alone are kept for them.
        unconcluded = self.outstanding() | self.returned
        assert self.reported_trained + len(unconcluded) <= self.steps * self.groups_per_step
        assert not self.reported_finished
        assert ask.served_version >= 0
        for item in self.eval_sets:
            if item.at_start:
                assert {f"{item.name}@0-{i}" for i in item.prompts} <= self.reported
        self.granted_under[uid] = ask.served_version
        self.grant_order[uid] = len(self.grant_order) + sum(map(len, self.numbers.values()))
        # The bound, in what is really trained and really still to be.
        unconcluded = self.outstanding() - set(self.concluded)
        admitted = self.trained_at[ask.served_version] + (self.staleness_max + 1) * self.per_version
        assert self.trained + len(unconcluded) <= admitted
        assert self.reported_trained + len(self.outstanding()) <= self.steps * self.groups_per_step

    def check_alone(self, rollouter: Rollouter, ask: Ask, grant: Grant, grants: list[Grant]) -> None:
        uid = grant.prompt.uid
        assert grant.alone == (self.tickets.supply.attempts.get(uid, 0) >= ALONE_FROM)
        if ask.incarnation != rollouter.incarnation:
            return
        held = rollouter.holding
        running = held.keys() - rollouter.generated
        assert not any(held[other].alone for other in running), "granted beside one that runs alone"
        if grant.alone:
            assert grants == [grant]
            assert not running, "granted alone to a rollouter that generates something else"

    def next_in_order(self) -> str:
        while True:
            epoch, index = self.order.at(self.position)
            self.position += 1
            if index not in self.oversize:
                return f"{epoch}-{index}"

    def taken_back(self, uid: str) -> None:
        del self.holder[uid]
        if not self.is_eval(uid):
            self.returned.add(uid)

    @rule(data=st.data(), free_groups=st.integers(1, 5), received=st.sampled_from([True, True, False]))
    def lease(self, data: st.DataObject, free_groups: int, received: bool) -> None:
        rollouter = data.draw(st.sampled_from(self.rollouters))
        ask = self.current(rollouter, free_groups)
        rollouter.asks.append(ask)
        self.send(rollouter, ask, received=received)

    @precondition(lambda self: any(r.asks for r in self.rollouters))
    @rule(data=st.data())
    def repeat_an_old_lease(self, data: st.DataObject) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.asks]))
        self.send(rollouter, data.draw(st.sampled_from(rollouter.asks)), received=False)

    @precondition(lambda self: any(r.holding for r in self.rollouters))
    @rule(data=st.data(), oldest=st.booleans(), kind=st.sampled_from(SIGNAL), acknowledged=st.booleans())
    def deliver_one(self, data: st.DataObject, oldest: bool, kind: str, acknowledged: bool) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.holding]))
        uid = next(iter(rollouter.holding)) if oldest else data.draw(st.sampled_from(sorted(rollouter.holding)))
        self.take_delivery(uid, kind)
        rollouter.generated.add(uid)
        if acknowledged:
            del rollouter.holding[uid]
            rollouter.generated.remove(uid)

    @precondition(lambda self: any(r.holding for r in self.rollouters))
    @rule(kinds=st.lists(st.sampled_from(SIGNAL), min_size=1, max_size=8))
    def deliver_many(self, kinds: list[str]) -> None:
        for rollouter in self.rollouters:
            for uid, kind in zip(list(rollouter.holding), kinds, strict=False):
                self.take_delivery(uid, kind)
                del rollouter.holding[uid]
                rollouter.generated.discard(uid)

    @precondition(lambda self: any(r.holding for r in self.rollouters))
    @rule(data=st.data(), repeated=st.booleans())
    def give_back(self, data: st.DataObject, repeated: bool) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.holding]))
        uids = data.draw(st.lists(st.sampled_from(sorted(rollouter.holding)), min_size=1, unique=True))
        for _ in range(1 + repeated):
            self.tickets.give_back(rollouter.name, rollouter.incarnation, uids)
        for uid in uids:
            del rollouter.holding[uid]
            rollouter.generated.discard(uid)
            if self.holder.get(uid) == (rollouter.name, rollouter.incarnation):
                self.taken_back(uid)

    @rule(data=st.data(), loaded=st.booleans())
    def crash(self, data: st.DataObject, loaded: bool) -> None:
        rollouter = data.draw(st.sampled_from(self.rollouters))
        rollouter.incarnation += 1
        rollouter.seen, rollouter.served = 0, self.version if loaded else -1
        rollouter.holding.clear()
        rollouter.generated.clear()

    @precondition(lambda self: any(r.served < self.version for r in self.rollouters))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.served < self.version]))
        rollouter.served = data.draw(st.integers(rollouter.served + 1, self.version))

    # --- the learner ---

    # What the real choice of the next step sees of the learner and of the dataloader.

    @property
    def buffer(self) -> GroupBuffer:
        buffer = GroupBuffer()
        for uid in sorted(self.buffered):
            # The worst that its engine may have done.
            buffer.add(group_of(uid, self.granted_under[uid]))
        return buffer

    @property
    def supply(self) -> SimpleNamespace:
        return SimpleNamespace(number=self.supply_seen)

    def has(self, uid: str) -> bool:
        return self.learner_has(uid)

    async def open_grants(self) -> GrantsOpen:
        grants = [
            OpenGrant(held.prompt.uid, held.served_version, held.rollouter or "") for held in self.tickets.open_grants
        ]
        assert {grant.uid for grant in grants} == self.outstanding()
        assert all(grant.served_version == self.granted_under[grant.uid] for grant in grants)
        return GrantsOpen(supply_number=self.tickets.supply_number, grants=grants)

    def take_delivery(self, uid: str, kind: str) -> None:
        if self.learner_has(uid):
            return
        if self.is_eval(uid):
            self.eval_held.setdefault(f"eval/{uid.rpartition('-')[0]}", set()).add(uid)
        elif kind == "trained" and not self.no_signal:
            self.buffered.add(uid)
        else:
            self.conclude(uid, "filtered" if kind == "trained" else kind)

    def conclude(self, uid: str, kind: str) -> None:
        assert uid not in self.concluded, "finished twice"
        self.concluded[uid] = kind
        self.pending.append(Outcome(uid, kind))

    def can_begin(self) -> bool:
        if self.in_training or self.step == self.steps or len(self.buffered) < self.groups_per_step:
            return False
        return bool(self.next_batch()) and self.next_batch() <= self.buffered

    def next_batch(self) -> set[str]:
        """In grant order: what was granted first is waited for. Or what the learner chooses that waits no longer than
        it must."""
        if self.waits:
            choosing = self.stragglers.step(self.version, self.step % self.steps_per_version)
            try:
                choosing.send(None)
            except StopIteration as done:
                chosen = set(done.value)
            else:
                raise AssertionError("it waits for something else")
            assert bool(chosen) != bool(self.stragglers.waits_for)
            return chosen
        among = (self.outstanding() - set(self.concluded)) | self.buffered if self.in_order else self.buffered
        return set(sorted(among, key=self.grant_order.__getitem__)[: self.groups_per_step])

    @precondition(lambda self: self.in_training or self.can_begin())
    @rule(halfway=st.booleans())
    def train(self, halfway: bool) -> None:
        """Half a step or a whole one."""
        if self.in_training:
            self.end_step()
        else:
            self.begin_step()
            if not halfway:
                self.end_step()

    def begin_step(self) -> None:
        self.in_training = self.next_batch()
        self.buffered -= self.in_training
        if self.in_order or self.waits:
            for uid in self.in_training:
                assert self.version - self.granted_under[uid] <= self.staleness_max
        self.signal = (len(self.buffered), self.waited)

    def end_step(self) -> None:
        for uid in sorted(self.in_training):
            self.conclude(uid, "trained")
        self.in_training = set()
        self.step += 1
        self.waited = not self.can_begin()
        if self.step % self.steps_per_version == 0:
            self.trained_at[self.version + 1] = self.trained
        if self.step == self.steps:
            self.finished = self.to_finish = True

    def read_supply(self) -> None:
        supply = self.tickets.supply
        self.supply_seen = supply.number
        for uid in (rejected.uid for rejected in supply.rejected):
            assert int(uid.partition("-")[2]) in self.oversize
            if uid not in self.concluded:
                self.conclude(uid, "quarantined")
        for key, size in supply.evals.items():
            if key not in self.eval_closed and len(self.eval_held.get(key, ())) == size:
                self.eval_closed.add(key)
                self.pending += [Outcome(uid, "evaluated") for uid in sorted(self.eval_held[key])]
        assert supply.outstanding == len(self.outstanding())
        left = self.steps * self.groups_per_step - self.reported_trained - len(self.outstanding())
        assert supply.exhausted == (self.reported_finished or left <= 0)

    @rule(acknowledged=st.sampled_from([True, True, False]))
    def send_report(self, acknowledged: bool) -> None:
        """The present report, again if its acknowledgement was lost; a new one otherwise."""
        self.read_supply()
        if self.report is None:
            if not (self.pending or self.signal or self.to_finish or self.version > self.tickets.newest_version):
                return
            self.report_number += 1
            self.report = Outcomes(
                number=self.report_number,
                version=self.version,
                trained_at_version=self.trained_at[self.version],
                outcomes=self.pending,
                buffered_groups=self.signal[0] if self.signal else 0,
                waited=bool(self.signal and self.signal[1]),
                step_began=self.signal is not None,
                finished=self.finished,
            )
            self.pending, self.signal, self.to_finish = [], None, False
        report = self.report
        assert self.tickets.report(report) == report.number
        for outcome in report.outcomes:
            if outcome.uid not in self.reported:
                self.reported.add(outcome.uid)
                self.reported_trained += outcome.kind == "trained"
                self.holder.pop(outcome.uid, None)
                self.returned.discard(outcome.uid)
        self.reported_finished |= report.finished
        if acknowledged:
            self.report = None

    @precondition(lambda self: self.asked is not None or self.tickets.orphans)
    @rule(answered=st.booleans())
    def settle(self, answered: bool) -> None:
        """Ask the learner about orphans, or take its answer, or both."""
        if self.asked is None:
            orphans = self.tickets.orphans
            self.asked = (orphans, {uid for uid in orphans if self.learner_has(uid)})
            if not answered:
                return
        orphans, held = self.asked
        self.asked = None
        still = set(self.tickets.orphans)
        self.tickets.settle(orphans, held)
        for uid in orphans:
            if uid in still and uid not in held:
                self.taken_back(uid)

    @rule(kinds=st.lists(st.sampled_from(SIGNAL), min_size=1, max_size=8), lag=st.integers(0, 2))
    def move_on(self, kinds: list[str], lag: int) -> None:
        """All that usually happens between two steps; brings the run forward."""
        for rollouter in self.rollouters:
            rollouter.served = max(rollouter.served, self.version - lag)
            self.send(rollouter, self.current(rollouter, 4), received=True)
        self.deliver_many(kinds)
        if self.in_training or self.can_begin():
            self.train(halfway=False)
        self.send_report(acknowledged=True)

    # --- always ---

    @invariant()
    def outstanding_is_what_was_granted_and_neither_reported_nor_taken_back(self) -> None:
        if hasattr(self, "tickets"):
            assert self.tickets.outstanding == len(self.outstanding())

    @invariant()
    def closed_only_at_the_end(self) -> None:
        if hasattr(self, "tickets") and self.tickets.closed:
            assert self.reported_finished
            assert not self.tickets.supply.evals

    def teardown(self) -> None:
        """From wherever this ended, a fair continuation ends the run in a bounded number of rounds."""
        if not hasattr(self, "tickets"):
            return
        groups = self.steps * self.groups_per_step
        rounds = 20 + 2 * groups + 8 * sum(len(item.prompts) for item in self.eval_sets)
        seen_at_start = len(self.reported)
        for number in range(rounds):
            self.fair_round()
            if self.tickets.closed:
                break
            if self.no_signal and number == rounds // 2:
                # Such a run is ended by its learner; until then each filtered group was replaced.
                assert len(self.reported) > seen_at_start
                self.finished = self.to_finish = True
        assert self.tickets.closed, "the loop does not end"
        if not self.no_signal:
            assert self.trained == groups
            assert sum(kind == "trained" for kind in self.concluded.values()) == groups
        for item in self.eval_sets:
            if item.at_start:
                assert f"eval/{item.name}@0" in self.eval_closed
            if item.at_end:
                assert f"eval/{item.name}@{self.version}" in self.eval_closed

    def fair_round(self) -> None:
        for _ in range(2):
            self.send_report(acknowledged=True)
        if self.asked is not None:
            self.settle(answered=True)
        if self.tickets.orphans:
            self.settle(answered=True)
        for rollouter in self.rollouters:
            rollouter.served = self.version
            self.send(rollouter, self.current(rollouter, 2), received=True)
            for uid in list(rollouter.holding):
                self.take_delivery(uid, "trained")
                del rollouter.holding[uid]
                rollouter.generated.discard(uid)
        while self.in_training or self.can_begin():
            self.train(halfway=False)


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

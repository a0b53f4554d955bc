"""I1, exactly once, in any order of events: the pure parts of dataloader and learner, and modelled rollouters.

Leases and their restoring on one side and the intake on the other are the real ones. Each of the three parties may die
between any two steps, the learner back to any earlier checkpoint. Messages are lost, repeated and late; some prompts
kill the engine that generates them.

From every reached state, a fair continuation ends each epoch and the run. Each prompt of a finished epoch then has
exactly one outcome, and is trained at most once in the history that leads to the final weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import msgspec
from dataloader.eval_sets import eval_set
from draws import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from made_group import make_group
from run_settings import simulated_run

from asyncrl.core.death_counts import ALONE_FROM
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.lease_book import Ask, LeaseBook, PromptLease
from asyncrl.dataloader.prompt_queue import PromptSource
from asyncrl.dataloader.restoring import Restorer, RollouterAnswer, inherit, missing
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Intake, IntakeState
from asyncrl.messages.dataloader import LeasesHeld, Outcome, Outcomes, Restored
from asyncrl.messages.groups import Group
from asyncrl.messages.ledger import Ledger, position_of

KINDS = ("trained", "trained", "trained", "filtered", "quarantined")
ACKNOWLEDGED = ("now", "now", "late", "never")
MAX_ATTEMPTS = 2
EPOCHS = 2
"""Epochs that must end in an endless run."""


class RememberedOrder(EpochOrder):
    """An order that is asked repeatedly for the same indices."""

    @cache  # noqa: B019 - there are a few dozen
    def indices(self, *which: int) -> Any:
        return super().indices(*which)


@dataclass
class Held:
    lease: PromptLease
    finished: bool = False


@dataclass
class Rollouter:
    """The true state of a rollouter."""

    name: str
    incarnation: int = 1
    seen: int = 0
    served: int = -1
    learner: int = 0
    """The incarnation that counts as alive."""
    dataloader: int = 0
    """The last one that got a message."""
    asks: list[Ask] = field(default_factory=list)
    """Every request sent; any may arrive again."""
    waits_for: Ask | None = None
    """The call whose answer it still accepts."""
    held: dict[str, Held] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    snapshot: IntakeState
    step: int
    trained: tuple[str, ...]
    """Uids in the order of their training, since the run began."""
    rounds_closed: tuple[str, ...]


@dataclass
class Restoring:
    """A dataloader that asks the rollouters which leases they hold."""

    request: Restored
    learner: int
    waiting: list[Rollouter]
    answers: dict[str, RollouterAnswer] = field(default_factory=dict)


class ExactlyOnce(RuleBasedStateMachine):
    """All parties. Attributes with ``leases`` are the dataloader's, those with ``intake`` the learner's."""

    @initialize(
        size=st.integers(2, 6),
        groups_per_step=st.integers(1, 3),
        steps_per_version=st.integers(1, 2),
        steps=st.one_of(st.integers(1, 8), st.just(10_000)),
        staleness_max=st.integers(0, 2),
        replicas=st.integers(1, 3),
        oversize=st.sampled_from([frozenset(), frozenset(), frozenset({0})]),
        poison=st.sampled_from([frozenset(), frozenset({1}), frozenset({0, 1})]),
        suspects=st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 5))),
        evals=st.booleans(),
        seed=st.integers(0, 3),
    )
    def start(
        self,
        size: int,
        groups_per_step: int,
        steps_per_version: int,
        steps: int,
        staleness_max: int,
        replicas: int,
        oversize: frozenset[int],
        poison: frozenset[int],
        suspects: frozenset[int],
        evals: bool,
        seed: int,
    ) -> None:
        self.size, self.steps, self.oversize = size, steps, oversize
        # At least one prompt must be trainable.
        self.poison = frozenset(index for index in poison if index < size - 1 and index not in oversize)
        config = simulated_run(
            learner={"groups_per_step": groups_per_step, "steps_per_version": steps_per_version},
            staleness={"max": staleness_max, "adapt": True},
            rollout={"max_attempts": MAX_ATTEMPTS},
        )
        self.config, self.capacity = config.learner, config.gate_capacity
        self.evaluates = evals
        sets = [eval_set("e", (0, 1), every_versions=2, at_start=True, at_end=True)] if evals else []
        self.make_restorer = partial(
            Restorer, config, [PromptSource(RememberedOrder("model", seed, size), oversize)], sets
        )
        self.restorer = self.make_restorer()
        self.mark = -1
        self.incarnations = 0
        self.rollouters = [Rollouter(f"rollouter/{i}") for i in range(replicas)]
        self.leases: LeaseBook | None = None
        self.previous: LeaseBook | None = None
        self.restoring: Restoring | None = None
        self.dead: dict[str, int] = {}
        self.restored_by = 0
        self.restored_number = 0
        self.status_number = 0
        self.asked: tuple[LeaseBook, list[str], set[str]] | None = None
        self.dataloader = 1
        self.late_acks: list[tuple[Rollouter, int, int, str, Held]] = []
        """Rollouter, its incarnation, the learner's, the group, and the lease under which it was delivered."""
        self.late_leases: list[tuple[Rollouter, int, int, list[PromptLease]]] = []
        """Rollouter, its incarnation, the dataloader's; of its last call, because it accepts no other."""
        self.blind = False
        """Whether an actor did not answer, or did not name what the learner has: it may be generated twice."""
        self.lone_deaths: Counter[str] = Counter()
        """Deaths of rollouters that held nothing but this prompt."""
        ledger = Ledger()
        ledger.attempts = {f"0-{index}": ALONE_FROM for index in suspects if index < size}
        self.checkpoints = [Checkpoint(IntakeState(ledger.state, [], []), 0, (), ())]
        self.start_learner(self.checkpoints[0])

    # --- the learner ---

    def start_learner(self, checkpoint: Checkpoint) -> None:
        self.incarnations += 1
        self.learner = self.incarnations
        self.intake = Intake(self.config, checkpoint.snapshot)
        self.evals = EvalCollector(checkpoint.rounds_closed)
        self.step, self.trained = checkpoint.step, list(checkpoint.trained)
        self.finished = False
        self.report: Outcomes | None = None
        self.waits = False
        """Whether it waits for the dataloader to restore the run's state."""
        self.unpublished = 0
        self.in_training: list[str] = []
        self.publish()
        if self.step == self.steps:
            self.finish()

    def publish(self) -> None:
        self.mark += 1
        self.version, self.trained_at = self.mark, self.intake.ledger.count("trained")
        self.unpublished = 0
        self.intake.outcomes.published(self.version, self.trained_at)

    def finish(self) -> None:
        self.finished = True
        self.intake.outcomes.finished()

    def has(self, uid: str) -> bool:
        return self.evals.holds(uid) if "@" in uid else self.intake.has(uid)

    def take_delivery(self, held: Held, kind: str) -> None:
        uid = held.lease.prompt.uid
        group = make_group(uid)
        lease = group.lease
        if "@" in uid:
            self.evals.add(group)
            return
        epoch, index = position_of(uid)
        lease = msgspec.structs.replace(
            lease,
            epoch=epoch,
            index=index,
            param_version=held.lease.param_version,
            attempt=held.lease.attempt,
        )
        for sample, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(sample) if kind == "trained" else 1.0
        if kind == "quarantined":
            group = Group(lease=lease, trajectories=[], failure="its reward hangs")
        else:
            group = Group(lease=lease, trajectories=group.trajectories)
        self.intake.deliver(group)

    def can_begin(self) -> bool:
        return (
            not self.in_training and self.step < self.steps and len(self.intake.buffer) >= self.config.groups_per_step
        )

    @precondition(lambda self: self.in_training or self.can_begin())
    @rule(halfway=st.booleans())
    def train(self, halfway: bool) -> None:
        """Half a step or a whole one; a version, and a checkpoint that may or may not be kept."""
        if not self.in_training:
            groups, _ = self.intake.begin_step()
            self.in_training = [group.lease.uid for group in groups]
            if halfway:
                return
        self.trained += self.in_training
        self.intake.end_step()
        self.in_training = []
        self.step += 1
        self.unpublished += 1
        if self.unpublished == self.config.steps_per_version or self.step == self.steps:
            self.publish()
            if self.step == self.steps:
                self.finish()
            self.checkpoints.append(
                Checkpoint(self.intake.state(), self.step, tuple(self.trained), tuple(self.evals.closed))
            )

    def crash_learner(self, back: int) -> None:
        """Its successor starts from one of the last checkpoints; later ones are void then."""
        del self.checkpoints[max(1, len(self.checkpoints) - back) :]
        self.start_learner(self.checkpoints[-1])

    def say_restored(self) -> None:
        """The state of the run; the dataloader starts to ask the rollouters."""
        request = Restored(
            version=self.version,
            trained_at_version=self.trained_at,
            groups_left=(self.steps - self.step) * self.config.groups_per_step,
            outcomes_number=self.intake.outcomes.restart(),
            ledger=self.intake.ledger.state,
            claims=self.intake.claims,
            fingerprint="model",
            seed=self.restorer.seed,
            rounds_closed=self.evals.closed,
            rounds_open=self.evals.open,
            finished=self.finished,
        )
        self.report = None
        if self.leases is not None:
            self.previous, self.leases = self.leases, None
        self.restoring = Restoring(request, self.learner, list(self.rollouters))

    @property
    def needs_restore(self) -> bool:
        return self.restoring is None and (self.leases is None or self.restored_by != self.learner)

    @precondition(lambda self: self.needs_restore)
    @rule()
    def begin_restoring(self) -> None:
        self.say_restored()

    @rule()
    def say_restored_again(self) -> None:
        """The reply was lost, or the deadline has passed."""
        self.say_restored()

    @precondition(lambda self: self.leases is not None and self.restored_by == self.learner)
    @rule(acknowledged=st.sampled_from([True, True, False]))
    def talk_to_the_dataloader(self, acknowledged: bool) -> None:
        """The status, and the present report, again if its acknowledgement was lost."""
        assert self.leases is not None
        status = self.leases.status
        self.evals.opened(status.evals)
        for rejected in status.rejected:
            self.check_rejected(rejected.uid)
            if "@" in rejected.uid:
                self.evals.reject(rejected.uid, rejected.reason)
            else:
                self.intake.reject(rejected)
        self.intake.ledger.attempts = dict(status.attempts)
        for _, groups in self.evals.complete():
            for group in groups:
                self.intake.outcomes.outcome(Outcome(group.lease.uid, "evaluated"))
        self.report = self.report or self.intake.outcomes.next_report()
        if self.report is not None:
            assert self.leases.report(self.report) == self.report.number
            if acknowledged:
                self.report = None

    def check_rejected(self, uid: str) -> None:
        if "@" not in uid and position_of(uid)[1] in self.oversize:
            return
        assert self.lone_deaths[uid] >= MAX_ATTEMPTS, f"{uid} is rejected without a fault of its own"

    # --- the dataloader ---

    def crash_dataloader(self) -> None:
        self.leases = self.previous = self.restoring = None
        self.dataloader += 1
        self.dead = {}
        self.restorer = self.make_restorer()

    @precondition(lambda self: self.restoring is not None and self.restoring.waiting)
    @rule(data=st.data(), answered=st.sampled_from([True, True, True, False]))
    def ask_rollouter(self, data: st.DataObject, answered: bool) -> None:
        """It answers, or counts as holding nothing. Its answer is true at that moment."""
        assert self.restoring is not None
        rollouter = data.draw(st.sampled_from(self.restoring.waiting))
        self.restoring.waiting.remove(rollouter)
        if answered:
            self.answer(rollouter)

    def answer(self, rollouter: Rollouter) -> None:
        assert self.restoring is not None
        if self.restoring.learner > rollouter.learner:
            rollouter.learner = self.restoring.learner
        attempts = {uid: held.lease.attempt for uid, held in rollouter.held.items()}
        self.restoring.answers[rollouter.name] = RollouterAnswer(
            rollouter.incarnation,
            LeasesHeld(seen=rollouter.seen, served_version=rollouter.served, attempts=attempts),
        )

    @precondition(lambda self: self.restoring is not None and not self.restoring.waiting)
    @rule(learner_answers=st.sampled_from([True, True, False]))
    def open_gate(self, learner_answers: bool) -> None:
        restoring, previous = self.restoring, self.previous
        assert restoring is not None
        leases = self.restorer.rebuild(restoring.request, restoring.answers, previous, self.status_number + 1)
        self.blind |= len(restoring.answers) < len(self.rollouters) or not learner_answers
        self.blind |= restoring.learner != self.learner
        asked = leases.to_come(self.capacity)
        if previous is not None:
            asked += missing(leases, previous)
        if learner_answers and restoring.learner == self.learner:
            for uid in asked:
                if self.has(uid):
                    leases.hold(uid)
        if previous is not None:
            inherit(leases, previous)
        for name, incarnation in self.dead.items():
            leases.died(name, incarnation)
        assert leases.status_number > self.status_number
        self.status_number = leases.status_number
        self.leases, self.previous, self.restoring = leases, None, None
        self.restored_by = restoring.learner

    @precondition(lambda self: self.asked is not None or (self.leases is not None and self.leases.orphans))
    @rule(answered=st.booleans())
    def settle(self, answered: bool) -> None:
        """Ask the learner about orphans, or take its answer, or both."""
        if self.asked is None:
            assert self.leases is not None
            orphans = self.leases.orphans
            self.asked = (self.leases, orphans, {uid for uid in orphans if self.has(uid)})
            if not answered:
                return
        leases, orphans, held = self.asked
        self.asked = None
        if leases is self.leases:
            leases.settle(orphans, held)

    # --- rollouters ---

    @rule(data=st.data(), free_groups=st.integers(1, 4), received=st.sampled_from(["now", "now", "late", "never"]))
    def lease(self, data: st.DataObject, free_groups: int, received: str) -> None:
        self.send_lease(data.draw(st.sampled_from(self.rollouters)), free_groups, received)

    def send_lease(self, rollouter: Rollouter, free_groups: int, received: str = "now") -> None:
        self.late_leases = [late for late in self.late_leases if late[0] is not rollouter]
        if self.leases is None or (self.leases.closed and not rollouter.held):
            return
        ask = Ask(
            rollouter.name,
            rollouter.incarnation,
            rollouter.seen,
            free_groups,
            rollouter.served,
            frozenset(rollouter.held),
            len(rollouter.asks) + 1,
        )
        rollouter.dataloader = self.dataloader
        rollouter.asks.append(ask)
        rollouter.waits_for = ask
        self.leases.meet(ask)
        before = set(self.leases.out)
        leases = self.leases.take(ask)
        for lease in leases:
            uid = lease.prompt.uid
            if isinstance(lease.prompt, EvalPrompt):
                assert rollouter.served >= lease.prompt.version
            else:
                assert self.leases.ledger.is_open(*position_of(uid))
            if uid not in before and not self.blind:
                assert not self.has(uid), "the learner has it"
                assert not any(uid in other.held for other in self.rollouters), "another rollouter does"
            if lease.alone:
                assert leases == [lease]
                assert rollouter.held.keys() <= {uid}, "leased to run alone, to a rollouter that holds another lease"
        if received == "now":
            self.receive(rollouter, leases)
        elif received == "late":
            self.late_leases.append((rollouter, rollouter.incarnation, self.dataloader, leases))

    def receive(self, rollouter: Rollouter, leases: list[PromptLease]) -> None:
        rollouter.waits_for = None
        self.late_leases = [late for late in self.late_leases if late[0] is not rollouter]
        for lease in leases:
            assert lease.number > rollouter.seen
            rollouter.seen = lease.number
            rollouter.held.setdefault(lease.prompt.uid, Held(lease))

    @precondition(lambda self: self.leases is not None and any(r.asks for r in self.rollouters))
    @rule(data=st.data())
    def an_old_lease_call_arrives_again(self, data: st.DataObject) -> None:
        """A copy of a lease call arrives. Its answer is received only if the rollouter still waits for that call."""
        assert self.leases is not None
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.asks]))
        ask = data.draw(st.sampled_from(rollouter.asks))
        self.leases.meet(ask)
        leases = self.leases.take(ask)
        if rollouter.waits_for is ask:
            rollouter.dataloader = self.dataloader
            self.late_leases.append((rollouter, rollouter.incarnation, self.dataloader, leases))

    @precondition(lambda self: self.late_leases)
    @rule(data=st.data())
    def receive_late(self, data: st.DataObject) -> None:
        """An answer to the latest lease call arrives, perhaps from a dataloader that has died since."""
        late = data.draw(st.sampled_from(self.late_leases))
        self.late_leases.remove(late)
        rollouter, incarnation, dataloader, leases = late
        if rollouter.incarnation == incarnation and rollouter.dataloader == dataloader:
            self.receive(rollouter, leases)

    @precondition(lambda self: any(r.served < self.mark for r in self.rollouters))
    @rule(data=st.data())
    def adopt_version(self, data: st.DataObject) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.served < self.mark]))
        rollouter.served = data.draw(st.integers(rollouter.served + 1, self.mark))

    def is_poison(self, uid: str) -> bool:
        return "@" not in uid and position_of(uid)[1] in self.poison

    @precondition(lambda self: any(not h.finished for r in self.rollouters for h in r.held.values()))
    @rule(
        data=st.data(),
        kind=st.sampled_from(KINDS),
        delivered=st.booleans(),
        acknowledged=st.sampled_from(ACKNOWLEDGED),
    )
    def finish_group(self, data: st.DataObject, kind: str, delivered: bool, acknowledged: str) -> None:
        """A group is done, or its prompt has its effect; it may be delivered, and that may be acknowledged."""
        rollouter = data.draw(
            st.sampled_from([r for r in self.rollouters if any(not h.finished for h in r.held.values())])
        )
        uid = data.draw(st.sampled_from([uid for uid, held in rollouter.held.items() if not held.finished]))
        if self.is_poison(uid):
            self.kill(rollouter)
            return
        rollouter.held[uid].finished = True
        if delivered:
            self.deliver(rollouter, uid, kind, acknowledged)

    @precondition(lambda self: any(h.finished for r in self.rollouters for h in r.held.values()))
    @rule(data=st.data(), kind=st.sampled_from(KINDS), acknowledged=st.sampled_from(ACKNOWLEDGED))
    def deliver_again(self, data: st.DataObject, kind: str, acknowledged: str) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if any(h.finished for h in r.held.values())]))
        uid = data.draw(st.sampled_from([uid for uid, held in rollouter.held.items() if held.finished]))
        self.deliver(rollouter, uid, kind, acknowledged)

    def deliver(self, rollouter: Rollouter, uid: str, kind: str, acknowledged: str) -> None:
        held = rollouter.held[uid]
        self.take_delivery(held, kind)
        ack = (rollouter, rollouter.incarnation, self.learner, uid, held)
        if acknowledged == "now":
            self.acknowledge(*ack)
        elif acknowledged == "late":
            self.late_acks.append(ack)

    @precondition(lambda self: self.late_acks)
    @rule(data=st.data())
    def acknowledge_late(self, data: st.DataObject) -> None:
        ack = data.draw(st.sampled_from(self.late_acks))
        self.late_acks.remove(ack)
        self.acknowledge(*ack)

    def acknowledge(self, rollouter: Rollouter, incarnation: int, learner: int, uid: str, delivered: Held) -> None:
        """Release the delivered lease, and no other lease of the same prompt.

        An acknowledgement from a learner that has a known successor releases nothing.
        """
        if rollouter.incarnation == incarnation and learner >= rollouter.learner:
            rollouter.learner = learner
            if rollouter.held.get(uid) is delivered:
                del rollouter.held[uid]

    def kill(self, rollouter: Rollouter, *, heard: bool = True) -> None:
        if len(rollouter.held) == 1:
            self.lone_deaths.update(list(rollouter.held))
        dead = rollouter.incarnation
        rollouter.incarnation += 1
        rollouter.seen, rollouter.served, rollouter.learner, rollouter.dataloader = 0, -1, 0, 0
        rollouter.held, rollouter.waits_for = {}, None
        if heard:
            self.dead[rollouter.name] = dead
            if self.leases is not None:
                self.leases.died(rollouter.name, dead)

    @precondition(lambda self: any(r.held for r in self.rollouters))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        rollouter = data.draw(st.sampled_from([r for r in self.rollouters if r.held]))
        uids = data.draw(st.lists(st.sampled_from(sorted(rollouter.held)), min_size=1, unique=True))
        if self.leases is None:
            # The call is parked.
            return
        # It may return the groups that have arrived.
        self.blind |= any(rollouter.held[uid].finished for uid in uids)
        self.leases.give_back(rollouter.name, rollouter.incarnation, uids)
        for uid in uids:
            del rollouter.held[uid]

    @rule(deliveries=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(ACKNOWLEDGED)), max_size=6))
    def move_on(self, deliveries: list[tuple[str, str]]) -> None:
        """The usual events between two steps, which advance the run."""
        self.restore_fully()
        for rollouter in self.rollouters:
            rollouter.served = self.mark
            self.send_lease(rollouter, 3)
            for uid, (kind, acknowledged) in zip(list(rollouter.held), deliveries, strict=False):
                if not self.is_poison(uid):
                    rollouter.held[uid].finished = True
                    self.deliver(rollouter, uid, kind, acknowledged)
        if self.in_training or self.can_begin():
            self.train(halfway=False)
        self.talk_to_the_dataloader(acknowledged=True)

    @rule()
    def restore_fully(self) -> None:
        if self.restoring is not None and self.restoring.learner != self.learner:
            self.restoring = None
        if self.needs_restore:
            self.say_restored()
        if self.restoring is not None:
            for rollouter in self.restoring.waiting:
                self.answer(rollouter)
            self.restoring.waiting = []
            self.open_gate(learner_answers=True)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Any party dies. A rollouter's successor reports the death to the dataloader, and may not have started yet."""
        who = data.draw(st.sampled_from(["learner", "dataloader", "rollouter", "rollouter", "silent rollouter"]))
        if who == "learner":
            self.crash_learner(data.draw(st.integers(0, 3)))
        elif who == "dataloader":
            self.crash_dataloader()
        else:
            self.kill(data.draw(st.sampled_from(self.rollouters)), heard=who == "rollouter")

    # --- invariants at all times ---

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if hasattr(self, "trained"):
            assert len(set(self.trained)) == len(self.trained)
            assert self.intake.ledger.count("trained") == len(self.trained)

    @invariant()
    def the_copy_of_the_ledger_is_never_ahead(self) -> None:
        if hasattr(self, "leases") and self.leases is not None and self.restored_by == self.learner:
            theirs, ours = self.leases.ledger, self.intake.ledger
            for epoch in range(theirs.next_epoch):
                for index in range(self.size):
                    assert theirs.is_open(epoch, index) or not ours.is_open(epoch, index)

    # --- the end ---

    def teardown(self) -> None:
        """From any state, a fair continuation ends the epochs and the run in a bounded number of rounds."""
        if not hasattr(self, "intake"):
            return
        endless = self.steps > 1000
        groups = EPOCHS * self.size if endless else self.steps * self.config.groups_per_step
        prompts = groups * (1 + len(self.poison))
        rounds = 40 + 8 * prompts * (ALONE_FROM + MAX_ATTEMPTS)
        done = self.epochs_are_over if endless else self.is_closed
        for _ in range(rounds):
            self.fair_round()
            if done():
                break
        assert done(), "the run does not continue"
        ledger = self.intake.ledger
        trained = set(self.trained)
        assert len(trained) == len(self.trained)
        for epoch in range(EPOCHS) if endless else ():
            assert not any(ledger.is_open(epoch, index) for index in range(self.size))
            assert not trained & {f"{epoch}-{index}" for index in self.oversize | self.poison}
        if endless:
            assert ledger.count("left_out") >= EPOCHS * len(self.oversize)
            assert ledger.count("quarantined") >= EPOCHS * len(self.poison)
        if not endless:
            assert len(self.trained) == groups
            if self.evaluates:
                assert f"e@{self.version}" in self.evals.closed

    def epochs_are_over(self) -> bool:
        return all(self.intake.ledger.concluded(epoch) == self.size for epoch in range(EPOCHS))

    def is_closed(self) -> bool:
        return self.leases is not None and self.leases.closed and self.restored_by == self.learner

    def fair_round(self) -> None:
        self.restore_fully()
        for _ in range(2):
            self.talk_to_the_dataloader(acknowledged=True)
        assert self.leases is not None
        while self.asked is not None or self.leases.orphans:
            self.settle(answered=True)
        for rollouter in self.rollouters:
            rollouter.served = self.mark
            self.send_lease(rollouter, 2)
            if any(map(self.is_poison, rollouter.held)):
                # The prompt stops killing engines.
                self.send_lease(rollouter, 2)
                self.kill(rollouter)
            elif rollouter.held:
                # One at a time: it almost always holds a lease.
                self.deliver(rollouter, next(iter(rollouter.held)), "trained", "now")
        while self.in_training or self.can_begin():
            self.train(halfway=False)


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)

"""Replicas and a learner, and a conductor that knows only their messages.

Callers behave as rollouter and learner do: one question at a time, repeated when its reply is lost; a parked question
is looked at again only when the conductor wakes it. The invariants are asserted after each step.
"""

from dataclasses import dataclass, field

from conductor_play import Play

from asyncrl.parameter_server.conductor import Conductor
from asyncrl.parameter_server.replicas import IDLE_PHASES, Phase

LEARNER = "learner/0"


@dataclass
class Caller:
    name: str
    incarnation: int = 1
    woken: bool = False
    """Whether its parked question has to be looked at again."""
    state: tuple = ("idle",)


@dataclass
class Rollouter(Caller):
    serving: int = -1
    engine: int = 0
    """Unique in the run."""
    workers: int = 1
    host: str = ""
    holds: bool = False
    """Whether it stages its version, for others of its host."""
    reported: tuple | None = None


@dataclass
class Group:
    """Facts of an epoch, from those who were assigned it."""

    world_size: int
    learner: int
    ranks: dict = field(default_factory=dict)
    """Member to (its engine, its ranks)."""


class World(Play):
    def __init__(self, *, workers=(1, 2, 1), hosts=("", "", ""), **weights):
        super().__init__(**weights)
        self.servers = self.engines = 0
        self.replicas = {}
        for i, count in enumerate(workers):
            self.replicas[f"r/{i}"] = Rollouter(f"r/{i}", engine=self.new_engine(), workers=count, host=hosts[i])
        self.learner = Caller(LEARNER)
        self.announced = self.published = -1
        self.groups = {}
        """Epoch to Group, over all parameter servers."""
        self.start_server()

    def new_engine(self):
        self.engines += 1
        return self.engines

    def callers(self):
        return [*self.replicas.values(), self.learner]

    # --- the parameter server ---

    def start_server(self):
        """A fresh one; calls in flight go to it."""
        self.servers += 1
        self.conductor = Conductor(self.weights, first_epoch=self.servers * 1000)
        self.joined, self.declined, self.loading = set(), set(), set()
        self.asked = {}

    def settle(self, looked=None):
        """After every message: the work of the shell, and the invariants. ``looked`` has just looked for its answer."""
        for name in self.woken():
            (self.learner if name == LEARNER else self.replicas[name]).woken = True
        if looked is not None:
            looked.woken = False
        loading = {r.name for r in self.conductor.replicas.by_name.values() if r.phase is Phase.LOADING}
        assert loading <= self.loading or len(loading) <= self.conductor.max_paused, "too many are paused"
        self.loading = loading
        fetching = [(r.host, r.target) for r in self.conductor.replicas.by_name.values() if r.is_fetching and r.host]
        assert len(fetching) == len(set(fetching)), "two of a host fetch the same"
        for caller in self.callers():
            if caller.name in self.asked and not caller.woken:
                assert not self.has_answer(caller), f"{caller} waits in vain"

    def has_answer(self, caller):
        question = self.asked[caller.name]
        if not self.conductor.replicas.is_open(question):
            return True
        # To look for an update would make it.
        if caller.state[0] == "next":
            replica = self.conductor.replicas.by_name[caller.name]
            if self.is_fetched_for(replica):
                return False
            behind = replica.phase in IDLE_PHASES and replica.serving < self.conductor.newest
            return behind or replica.phase is Phase.ANNOUNCED
        return self.conductor.answer(question, self.now) is not None

    def is_fetched_for(self, replica):
        others = [other for other in self.conductor.replicas.by_name.values() if other.host == replica.host != ""]
        if self.conductor._find_copy(replica) is not None:
            return False
        return any(other.is_fetching and other.target > replica.serving for other in others)

    def later(self, seconds):
        """Time passes at once, as for a shell that has not come to run."""
        self.now += seconds
        deadline = self.conductor.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.conductor.pass_time(self.now)
        self.settle()
        deadline = self.conductor.next_deadline()
        assert deadline is None or deadline > self.now

    # --- questions ---

    def ask(self, caller):
        """Send the message of the caller's state. Returns the answer, None while it stays parked."""
        (kind, *of), name, life = caller.state, caller.name, caller.incarnation
        caller.woken = False
        if kind == "next":
            place = {"workers": caller.workers, "host": caller.host, "same_host": not caller.host}
            return self.next(name, caller.serving, life, **place)
        if kind == "pause":
            return self.pause(name, *of, life, paths=["/proc/1/fd/1"] * 2 if caller.holds else [])
        if kind == "join":
            known = self.conductor.replicas.by_name.get(name)
            if known and known.target == of[0]:
                self.joined.add((name, caller.engine, *of))
            return self.join(name, *of, life)
        if kind == "sending":
            return self.watch(*of, learner=(name, life))
        return self.announce(*of, learner=(name, life), port=7000 + life)

    def answer(self, caller, lost=False):
        """The answer to the caller by now, if there is one; ``lost`` loses it."""
        if caller.name not in self.asked:
            found = self.ask(caller)
        elif caller.woken:
            caller.woken = False
            found = self.look(caller.name)
        else:
            return None
        self.settle(looked=caller)
        if found is not None:
            self.check(caller, found)
        return None if lost else found

    def end_of_park(self, caller):
        if caller.name in self.asked:
            super().end_of_park(caller.name)
            self.settle()

    def cancel(self, caller, lost=False):
        if caller.name in self.asked and not lost:
            super().cancel(caller.name)
        self.asked.pop(caller.name, None)

    def check(self, caller, found):
        kind, *of = caller.state
        if kind == "next" and found.broadcast is not None:
            self.check_update(caller, found)
        elif kind == "next":
            paths = found.transport == "shm" and caller.host and found.manifest.buckets[0].path
            assert caller.serving < found.version <= self.conductor.newest
            assert found.version == self.conductor.newest or paths, "a replica that has not waited takes the newest"
            assert found.version in self.conductor.needed() or paths
            assert not (paths and found.turn)
        elif kind == "join" and found:
            assert of[0] not in self.declined, "begun, although the learner got the opposite answer"
        elif kind == "announce" and found.group is None:
            self.declined.add(of[0])
        elif kind == "announce":
            self.check_group(of[0], found.group)

    def check_update(self, caller, update):
        assert 0 <= caller.serving < update.version
        group, first = update.broadcast.group, update.broadcast.first_rank
        known = self.groups.setdefault(group.epoch, Group(group.world_size, group.port - 7000))
        assert (known.world_size, known.learner) == (group.world_size, group.port - 7000), "an epoch is shared"
        entry = (caller.engine, range(first, first + caller.workers))
        assert known.ranks.setdefault(caller.name, entry) == entry, "an epoch is shared by two engines"
        ranks = [rank for _, ranks in known.ranks.values() for rank in ranks]
        assert len(ranks) == len(set(ranks)) and min(ranks) >= 1 and max(ranks) < group.world_size

    def check_group(self, version, group):
        known = self.groups[group.epoch]
        ranks = sorted(rank for _, ranks in known.ranks.values() for rank in ranks)
        assert ranks == list(range(1, group.world_size)), "not all were assigned it"
        members = {(name, engine) for name, (engine, _) in known.ranks.items()}
        assert members == {(n, engine) for n, engine, v, e in self.joined if (v, e) == (version, group.epoch)}
        assert known.learner == self.learner.incarnation

    # --- what callers do ---

    def step(self, name, lost=False):
        """A replica's next step; ``lost`` loses the reply, or the report."""
        caller = self.replicas[name]
        kind, *of = caller.state
        if kind in ("next", "pause", "join"):
            if (found := self.answer(caller, lost)) is not None:
                self.answered(caller, found)
        elif kind == "loading":
            self.end(caller, committed=True, lost=lost)
        elif kind == "receiving":
            if self.learner.state == ("sent", *of):
                self.end(caller, committed=True, lost=lost)
        else:
            caller.state = {"idle": "next", "staging": "pause", "assigned": "join"}[kind], *of

    def answered(self, caller, found):
        kind, *of = caller.state
        if kind == "next" and found.broadcast is None:
            caller.state, caller.holds = ("staging", found.version), found.turn > 0
        elif kind == "next":
            caller.state = "assigned", found.version, found.broadcast.group.epoch
        elif kind == "pause":
            caller.state = "loading", *of
        else:
            caller.state = ("receiving", *of) if found else ("idle",)

    def end(self, caller, *, committed, lost=False):
        version = caller.state[1]
        if committed:
            caller.serving = version
        caller.state, caller.reported = ("idle",), (version, committed)
        if not lost:
            self.report(caller.name, version, committed, caller.incarnation)
            self.settle()

    def fail(self, name, lost=False):
        """Its update fails; a question that it cancels then is cancelled without a message."""
        caller = self.replicas[name]
        if caller.state[0] in ("staging", "pause", "loading", "assigned", "join", "receiving"):
            self.asked.pop(name, None)
            self.end(caller, committed=False, lost=lost)

    def repeat_report(self, name):
        """The last report arrives again, at any time."""
        caller = self.replicas[name]
        if caller.reported is not None:
            version, committed = caller.reported
            self.report(name, version, committed, caller.incarnation)
            self.settle()

    def give_up(self, name, lost=False):
        """It cancels its question; ``lost``: without a message."""
        caller = self.replicas[name]
        self.cancel(caller, lost)
        caller.state = ("idle",)
        self.settle()

    def lose_engine(self, name, lost=False):
        caller = self.replicas[name]
        self.cancel(caller, lost)
        caller.state, caller.serving, caller.engine = ("idle",), -1, self.new_engine()
        # A connection keeps the order of messages: no older report arrives after the new engine's first question.
        caller.reported = None
        self.settle()

    def sleep_in_turn(self, name, lost=False):
        """Its engine sleeps and wakes; ``lost``: the report of that is lost, and nothing else is sent."""
        caller = self.replicas[name]
        if lost:
            self.asked.pop(name, None)
        else:
            self.sleep(name, caller.incarnation)
        # The parameter server takes it for a new engine.
        caller.state, caller.serving, caller.engine = ("idle",), -1, self.new_engine()
        caller.reported = None
        self.settle()

    def die(self, name, lost=False):
        """``lost``: it is known only with the successor's first message."""
        caller = self.replicas[name]
        old = caller.incarnation
        self.replicas[name] = Rollouter(
            name, old + 1, engine=self.new_engine(), workers=caller.workers, host=caller.host
        )
        self.woken()
        self.asked.pop(name, None)
        if not lost:
            self.left(name, old)
        self.settle()

    # --- what the learner does ---

    def begin_version(self):
        if self.learner.state == ("idle",) and self.published == self.announced:
            self.announced += 1
            self.learner.state = "announce", self.announced
            self.step_learner()

    def step_learner(self, lost=False):
        kind, *of = self.learner.state
        if kind == "announce" and (found := self.answer(self.learner, lost)) is not None:
            self.learner.state = ("idle",) if found.group is None else ("sending", *of, found.group.epoch)
        elif kind == "sending" and (found := self.answer(self.learner, lost)) is not None and found.error:
            self.send(found.error)

    def publish_announced(self):
        if self.announced >= 0:
            self.published = self.announced
            if self.conductor.is_new(self.published):
                self.publish(self.published)
                self.settle()

    def send(self, error=""):
        kind, *of = self.learner.state
        if kind == "sending":
            # It no longer watches.
            self.cancel(self.learner)
            self.learner.state = ("idle",) if error else ("sent", *of)
            if error:
                self.watch(*of, error, learner=(LEARNER, self.learner.incarnation))
                self.cancel(self.learner)
            self.settle()

    def forget_sent(self):
        if self.learner.state[0] == "sent":
            self.learner.state = ("idle",)

    def cancel_learner(self):
        self.cancel(self.learner)
        self.settle()

    def learner_dies(self):
        old = self.learner
        self.learner = Caller(LEARNER, old.incarnation + 1)
        self.published = self.announced
        self.asked.pop(LEARNER, None)
        self.left(LEARNER, old.incarnation)
        self.settle()

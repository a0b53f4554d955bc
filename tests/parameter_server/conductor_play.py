"""A conductor under one's own clock, and callers that need few words."""

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.weights import Announce, BucketLayout
from asyncrl.parameter_server.conductor import Conductor

LEARNER = ("learner/0", 1)
LAYOUT = [BucketLayout(size=64, tensors=[])]


def announcement(version, *, backend="gloo", port=7000, probe=None):
    return Announce(version=version, backend=backend, host="127.0.0.1", port=port, buckets=LAYOUT, probe=probe)


class Play:
    """Keyword arguments are those of [weights]."""

    def __init__(self, *, first_epoch=1, **weights):
        self.weights = WeightsConfig(**{"transport": "gloo", "deadline_s": 10, "broadcast_timeout_s": 4, **weights})
        self.conductor = Conductor(self.weights, first_epoch=first_epoch)
        self.now = 100.0
        self.asked = {}

    def replica(self, name):
        return self.conductor.fleet.replicas[name]

    def phases(self):
        return {name: str(replica.phase) for name, replica in sorted(self.conductor.fleet.replicas.items())}

    def woken(self):
        return self.conductor.fleet.take_effects().wake

    def effects(self, event):
        """Who is woken, and the notes of this kind."""
        effects = self.conductor.fleet.take_effects()
        return effects.wake, [note for note in effects.notes if note.event == event]

    def figure(self, name):
        return self.conductor.figures()[name]

    def counts(self, *names):
        return tuple(self.figure(f"broadcasts_{name}") for name in names)

    def needed(self):
        return self.conductor.publications.needed()

    def later(self, seconds):
        """Time passes, and the shell's timer is what it is."""
        until = self.now + seconds
        while (deadline := self.conductor.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.conductor.pass_time(self.now)
            assert self.conductor.next_deadline() != deadline, "the same deadline for ever"
        self.now = until

    def publish(self, version):
        if version > self.conductor.publications.accepted:
            self.conductor.publications.accept(version)
        self.conductor.publications.publish(version)

    def _answer(self, name, number, answer):
        found = answer() if self.conductor.fleet.asks(name, number) else None
        if found is not None:
            self.conductor.answered(name, number, self.now)
        if self.conductor.fleet.asks(name, number):
            self.asked[name] = number, answer
        else:
            self.asked.pop(name, None)
        return found

    def look(self, name):
        """The answer to the caller's parked question by now."""
        return self._answer(name, *self.asked[name])

    def end_of_park(self, name):
        """The caller is told to ask again."""
        self.conductor.answered(name, self.asked.pop(name)[0], self.now)

    def cancel(self, name):
        self.conductor.withdrew(name, self.asked.pop(name)[0], self.now)

    def next(self, name, serving, incarnation=1, **place):
        number = self.conductor.next_update(name, incarnation, serving=serving, now=self.now, **place)
        return self._answer(name, number, lambda: self.conductor.offer(name, self.now))

    def pause(self, name, version, incarnation=1, paths=()):
        number = self.conductor.request_pause(name, incarnation, version, self.now, paths=paths)
        return self._answer(name, number, lambda: self.conductor.may_pause(name, version))

    def join(self, name, version, epoch, incarnation=1):
        number = self.conductor.join(name, incarnation, version, epoch, self.now)
        return self._answer(name, number, lambda: self.conductor.begins(name, version, epoch))

    def report(self, name, version, committed=True, incarnation=1, **how):
        return self.conductor.report(name, incarnation, version, committed=committed, now=self.now, error="oh", **how)

    def announce(self, version, learner=LEARNER, **changes):
        number = self.conductor.announce(*learner, announcement(version, **changes), self.now)
        return self._answer(learner[0], number, lambda: self.conductor.broadcasts.decided(version))

    def ended(self, version, epoch, error="", again=False):
        self.conductor.broadcast_ended(version, epoch, error, self.now, again=again)

    def left(self, name, incarnation=1):
        self.conductor.left(name, incarnation, self.now)

    # --- whole passages ---

    def commit(self, name, version, serving=-1, **place):
        """A rolling update from the offer to the commit; the replica asks for the next one afterwards."""
        life = place.get("incarnation", 1)
        offer = self.next(name, serving, **place)
        assert offer is not None and offer.version == version and offer.collective is None, offer
        assert self.pause(name, version, life)
        assert self.report(name, version, incarnation=life)
        assert self.next(name, version, **place) is None

    def serve(self, *names, version=0, **place):
        """All of them serve ``version``, and wait for the next."""
        if self.conductor.publications.accepted < version:
            self.publish(version)
        for name in names:
            self.commit(name, version, **place)

    def gather(self, version, *names, **changes):
        """Announce, offer, join: all but the last one's join, which is left to the caller. Returns the epoch."""
        assert self.announce(version, **changes) is None
        epoch = None
        for name in names:
            offer = self.look(name)
            assert offer is not None and offer.collective is not None and offer.version == version
            epoch = offer.collective.group.epoch
        for name in names[:-1]:
            assert self.join(name, version, epoch) is None
        return epoch

    def begin(self, version, *names, **changes):
        """A broadcast that all are in. Returns its epoch."""
        epoch = self.gather(version, *names, **changes)
        assert self.join(names[-1], version, epoch)
        assert all(self.look(name) for name in names[:-1])
        answer = self.look("learner/0")
        assert answer.decided and answer.group.epoch == epoch
        return epoch

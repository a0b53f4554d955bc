"""A conductor on a clock of the test's own, and short calls to it."""

from asyncrl.config.rollout import WeightsConfig
from asyncrl.messages.learner import UpdateTimes
from asyncrl.messages.weights import (
    AnnounceBroadcast,
    Bucket,
    LoadAnswer,
    Manifest,
    NextUpdate,
    ReportUpdate,
    RequestLoad,
    UpdateAnswer,
    WatchBroadcast,
)
from asyncrl.parameter_server.conductor import Conductor

LEARNER = ("learner/0", 1)
BUCKETS = [Bucket(path="", size=64, checksum=0, tensors=[])] * 2


def announcement(version, *, backend="gloo", port=7000, probe=None):
    manifest = Manifest(version=version, buckets=BUCKETS, probe=probe)
    return AnnounceBroadcast(manifest=manifest, backend=backend, host="127.0.0.1", port=port)


class Play:
    """Keyword arguments are those of [weights]."""

    def __init__(self, *, first_epoch=1, **weights):
        self.weights = WeightsConfig(**{"transport": "gloo", "deadline_s": 10, "broadcast_timeout_s": 4, **weights})
        self.conductor = Conductor(self.weights, first_epoch=first_epoch)
        self.now = 100.0
        self.asked = {}

    def replica(self, name):
        return self.conductor.replicas.by_name[name]

    def phases(self):
        return {name: str(replica.phase) for name, replica in sorted(self.conductor.replicas.by_name.items())}

    def woken(self):
        return self.conductor.replicas.take_effects()[0]

    def effects(self, event):
        """The callers that are woken, and the notes of this kind."""
        woken, notes = self.conductor.replicas.take_effects()
        return woken, [note for note in notes if note.event == event]

    def figure(self, name):
        return self.conductor.metrics()[name]

    def counts(self, *names):
        return tuple(self.figure(f"broadcasts_{name}") for name in names)

    def needed(self):
        return self.conductor.needed()

    def later(self, seconds):
        """Time passes, with the shell's timer."""
        until = self.now + seconds
        while (deadline := self.conductor.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.conductor.pass_time(self.now)
            assert self.conductor.next_deadline() != deadline, "the same deadline for ever"
        self.now = until

    def publish(self, version):
        self.conductor.publish(Manifest(version=version, buckets=BUCKETS))

    def _ask(self, name, incarnation, request, **place):
        """Returns the answer, None while the question is parked."""
        self.asked[name] = self.conductor.ask(name, incarnation, request, self.now, **place)
        return self.look(name)

    def look(self, name):
        """The present answer to the caller's parked question."""
        question = self.asked.pop(name)
        if not self.conductor.replicas.is_open(question):
            return None
        found = self.conductor.answer(question, self.now)
        if found is None:
            self.asked[name] = question
            return None
        self.conductor.answered(question, self.now)
        if isinstance(found, LoadAnswer):
            return found.may_load
        return found.update if isinstance(found, UpdateAnswer) else found

    def end_of_park(self, name):
        """The caller gets the answer to ask again."""
        self.conductor.answered(self.asked.pop(name), self.now)

    def cancel(self, name):
        self.conductor.withdrew(self.asked.pop(name), self.now)

    def next(self, name, serving, incarnation=1, *, same_host=True, host="", **place):
        return self._ask(name, incarnation, NextUpdate(serving=serving, host=host, **place), same_host=same_host)

    def pause(self, name, version, incarnation=1, paths=()):
        return self._ask(name, incarnation, RequestLoad(version=version, paths=list(paths)))

    def join(self, name, version, epoch, incarnation=1):
        return self._ask(name, incarnation, RequestLoad(version=version, epoch=epoch))

    def report(self, name, version, committed=True, incarnation=1):
        report = ReportUpdate(version=version, committed=committed, times=UpdateTimes(version=version), error="oh")
        return self.conductor.report(name, incarnation, report, self.now)

    def sleep(self, name, incarnation=1):
        self.asked.pop(name, None)
        self.conductor.slept(name, incarnation, self.now)

    def announce(self, version, learner=LEARNER, **changes):
        return self._ask(*learner, announcement(version, **changes))

    def watch(self, version, epoch, error="", learner=LEARNER):
        return self._ask(*learner, WatchBroadcast(version=version, epoch=epoch, error=error))

    def left(self, name, incarnation=1):
        self.conductor.left(name, incarnation, self.now)

    # --- several steps ---

    def commit(self, name, version, serving=-1, **place):
        """An update by shm or stream, from its start to the commit; the replica asks for the next one afterwards."""
        life = place.get("incarnation", 1)
        update = self.next(name, serving, **place)
        assert update is not None and update.version == version and update.broadcast is None, update
        assert self.pause(name, version, life)
        assert self.report(name, version, incarnation=life)
        assert self.next(name, version, **place) is None

    def serve(self, *names, version=0, **place):
        """All of them serve ``version``, and wait for the next."""
        if self.conductor.newest < version:
            self.publish(version)
        for name in names:
            self.commit(name, version, **place)

    def gather(self, version, *names, **changes):
        """Announce, assign, join: all but the last one's join, which is left to the caller. Returns the epoch."""
        assert self.announce(version, **changes) is None
        epoch = None
        for name in names:
            update = self.look(name)
            assert update is not None and update.broadcast is not None and update.version == version
            epoch = update.broadcast.group.epoch
        for name in names[:-1]:
            assert self.join(name, version, epoch) is None
        return epoch

    def begin(self, version, *names, **changes):
        """A broadcast with all of these as members. Returns its epoch."""
        epoch = self.gather(version, *names, **changes)
        assert self.join(names[-1], version, epoch)
        assert all(self.look(name) for name in names[:-1])
        answer = self.look("learner/0")
        assert answer.decided and answer.group.epoch == epoch
        return epoch

"""The table of planted faults: mistakes that a tired reader misses, each with the invariant or promise that it breaks.

A fault is a text that occurs once in ``asyncrl/`` and its replacement, so it is found in any file. docs/architecture.md
defines I1 to I8.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake. ``breaks`` is the broken invariant or promise."""

    name: str
    right: str
    wrong: str
    breaks: str


FAULTS = (
    # --- the dataloader: gate, limit, leases, outcomes ---
    Fault(
        "gate-counts-from-newest-version",
        "admitted = self._trained_at[index] + self.limit.groups + self._groups_per_version",
        "admitted = self._trained_at[-1] + self.limit.groups + self._groups_per_version",
        "I2: a group counts from the version that its rollouter serves, not from the newest one",
    ),
    Fault(
        "limit-grows-without-refusal",
        "if waited and refused:",
        "if waited:",
        "the working limit is as low as keeps the learner fed: it grows only where it was the cause of a wait",
    ),
    Fault(
        "leases-take-report-after-gap",
        "if report.number != self.number + 1:",
        "if report.number <= self.number:",
        "I1: an acknowledgement covers every report before it",
    ),
    Fault(
        "settled-prompt-stays-suspect",
        "self.out[uid].suspect = False",
        "self.out[uid].suspect = True",
        "I1: a prompt that the learner holds did not kill its rollouter, and is not quarantined for it",
    ),
    Fault(
        "ledger-takes-first-byte-for-full",
        "found: np.ndarray = byte < 0",
        "found: np.ndarray = byte <= 0",
        "I1: a prompt without an outcome is leased",
    ),
    Fault(
        "intake-forgets-step-in-training",
        "return uid in self._in_training or uid in self.buffer or not self.ledger.is_open(*position_of(uid))",
        "return uid in self.buffer or not self.ledger.is_open(*position_of(uid))",
        "I1: a group in training is not taken again",
    ),
    Fault(
        "intake-takes-concluded-group-again",
        'if self.has(uid):\n            return "duplicate"',
        'if uid in self.buffer:\n            return "duplicate"',
        "I1: a group that is delivered twice is trained once",
    ),
    Fault(
        "outcomes-acknowledged-by-any-answer",
        "if seen.number >= report.number:",
        "if seen.number >= 0:",
        "I1: an outcome that the dataloader lacks is reported again",
    ),
    # --- the parameter server: who takes over what, and when ---
    Fault(
        "conductor-admits-beside-pauses",
        "free = self.max_paused - len(self.replicas.in_phase[Phase.LOADING])",
        "free = self.max_paused",
        "no more replicas pause at once than weights.max_paused_fraction lets",
    ),
    Fault(
        "conductor-looks-late-at-pauses",
        "Phase.LOADING: weights.deadline_s}",
        "Phase.LOADING: weights.stage_deadline_s}",
        "I5: a pause is taken back at its deadline",
    ),
    Fault(
        "broadcast-counts-replicas-as-ranks",
        "rank += replica.workers",
        "rank += 1",
        "I4: each worker of a group has a rank of its own",
    ),
    Fault(
        "broadcast-keeps-broken-group",
        "if epoch == self._epoch:",
        "if epoch < self._epoch:",
        "I4: a process group that broke is not used again",
    ),
    # --- the rollouter and the weights ---
    Fault(
        "call-off-resumes-after-failed-load",
        "if self._loaded is not None and self._loaded == self.version:",
        "if self.version >= 0:",
        "I4: an engine whose load failed stays paused",
    ),
    Fault(
        "broadcast-group-used-after-break",
        'if self._stopped.done():\n            self.end("")',
        'if False:\n            self.end("")',
        "I4: nothing is received in an epoch that is over",
    ),
    Fault(
        "fetch-takes-short-chunk",
        "if data.nbytes != request.size:",
        "if data.nbytes > request.size:",
        "I4: a chunk is verified before it is written",
    ),
    Fault(
        "bucket-held-against-size-alone",
        "compare_checksums(found.checksum, bucket.checksum, version=version, index=index)",
        "pass",
        "I4: a bucket's checksum is verified before it counts",
    ),
    # --- the learner's algorithm ---
    Fault(
        "loss-clips-both-sides",
        "clipped = bounded < plain",
        "clipped = bounded != plain",
        "I8: a clip acts only where it lowers the objective",
    ),
    Fault(
        "advantage-scales-past-rewards",
        "centred * (len(group.rewards) / (len(group.rewards) - 1)) - past",
        "(centred - past) * (len(group.rewards) / (len(group.rewards) - 1))",
        "I8: rloo takes the past of a turn off its return as it is",
    ),
    Fault(
        "constant-weight-of-a-mean",
        'return 1.0 / loss_tokens if aggregation == "sequence" else 1.0',
        'return 1.0 if aggregation == "token" else 1.0 / loss_tokens',
        "I8: under learner.aggregation = constant a token's weight does not depend on the response's length",
    ),
    Fault(
        "correction-upside-down",
        "ratio = log_ratio(batch.proximal.detach(), batch.behaviour)",
        "ratio = log_ratio(batch.behaviour, batch.proximal.detach())",
        "I8: a correction is the learner's probability over the engine's",
    ),
    Fault(
        "batch-trains-one-version-too-stale",
        "oldest = version - config.staleness.max if config.staleness.hard else None",
        "oldest = version - config.staleness.max - 1 if config.staleness.hard else None",
        "I2: no token that is trained is staler than staleness.max",
    ),
    Fault(
        "batch-gives-turns-of-another-sequence",
        "turns_done += len(turn_lengths)",
        "turns_done = len(turn_lengths)",
        "I8: each token has the advantage of its own turn",
    ),
    Fault(
        "batch-dates-mixed-tokens",
        "stale = np.array([-1 if span.mixed_kv else version - span.version for span in spans], np.int32)",
        "stale = np.array([version - span.version for span in spans], np.int32)",
        "I3: a log-prob of no single version is not held against one",
    ),
    Fault(
        "packing-forgets-prefix",
        "if all(len(unit) == 1 or sizes.tokens(unit) <= budget for unit in units):",
        "if all(len(unit) == 1 or int(sizes.own[unit].sum()) <= budget for unit in units):",
        "a row computes at most learner.tokens_per_microbatch tokens unless it is one sequence",
    ),
    Fault(
        "sharing-takes-first-difference",
        "return int(different.argmax()) if different.any() else shortest",
        "return int(different.argmax()) + 1 if different.any() else shortest",
        "I3: a token is trained in the context that it was sampled in",
    ),
    # --- the wire ---
    Fault(
        "codec-counts-frames-from-one",
        "if not (_is_size(index) and index < len(self._incoming)):",
        "if not (_is_size(index) and index <= len(self._incoming)):",
        "I6: a body that names a frame which is not there is refused as malformed",
    ),
    Fault(
        "envelope-takes-older-protocol",
        "if header.protocol != PROTOCOL_VERSION:",
        "if header.protocol > PROTOCOL_VERSION:",
        "I6: no client of another protocol is served",
    ),
    Fault(
        "server-takes-any-known-key",
        "elif credentials.curve and owner != hello.name:",
        "elif credentials.curve and not owner:",
        "I6: a key fits the name of its owner alone",
    ),
    Fault(
        "server-drops-reply-still-asked-for",
        "if id < header.answered_below]:",
        "if id <= header.answered_below]:",
        "a call that may not be repeated is run once, though its reply is lost",
    ),
    Fault(
        "peer-believes-replaced-incarnation",
        "if header.incarnation < max(self._incarnation, self._adopted):",
        "if header.incarnation < self._incarnation:",
        "I1: an acknowledgement of a learner that was replaced releases nothing",
    ),
    Fault(
        "door-saves-up-without-bound",
        "self._tokens = min(BURST, self._tokens + PER_S * (now - self._counted_at)) - 1",
        "self._tokens = self._tokens + PER_S * (now - self._counted_at) - 1",
        "I6: in t seconds no more than BURST + t PER_S connections begin",
    ),
    Fault(
        "seal-without-incarnation",
        "sealed_fields = [lease.uid, lease.number, lease.purpose, rollouter, incarnation]",
        "sealed_fields = [lease.uid, lease.number, lease.purpose, rollouter]",
        "I6: a lease fits the incarnation that it was leased to and nobody else",
    ),
    # --- life and death ---
    Fault(
        "supervision-one-restart-more",
        "if len(self._recent) >= self.max_restarts:",
        "if len(self._recent) > self.max_restarts:",
        "an actor is restarted at most supervision.max_restarts times within a window",
    ),
    Fault(
        "registry-counts-own-silence",
        "return now - max(heard, self._listening_since)",
        "return now - heard",
        "a controller that was stopped itself condemns nobody for what it did not hear",
    ),
    Fault(
        "incarnation-of-another-host-without-leap",
        "self._newest[actor.name] = actor.incarnation + LEAP",
        "self._newest[actor.name] = actor.incarnation",
        "I1: no two lives of a name have one number, though a host is cut off",
    ),
    Fault(
        "run-preempted-without-checkpoint",
        "if self.checkpoint < 0:",
        "if not self.checkpoint:",
        "exit code 75 says that there is a checkpoint to go on from",
    ),
    Fault(
        "stall-never-ends-run",
        "if (now < self._next_report and not ends_run) or self._has_budget(actors):",
        "if now < self._next_report or not ends_run or self._has_budget(actors):",
        "I5: a stall is reported after watchdog.stall_s, and ends the run in time",
    ),
    Fault(
        "agent-kills-successor-of-condemned",
        "if self.incarnations.get(each.name) == each.incarnation:",
        "if each.name in self.incarnations:",
        "only the very process that is condemned is killed for it",
    ),
    Fault(
        "agent-restarts-on-leaving-host",
        "if self.ending or self.leaving:",
        "if self.ending:",
        "I7: a host that is to leave starts nothing any more, and ends when its actors have",
    ),
    Fault(
        "checkpoint-below-newest-step",
        "if version < newest or (newest_step is not None and step < newest_step):",
        "if version < newest and (newest_step is None or step < newest_step):",
        "nothing is committed below the newest checkpoint, neither by its version nor by its step",
    ),
)

"""Exceptions that asyncrl raises on purpose; some modules define further ones.

They have one root, so that a caller can catch all of them and nothing else. Each subclass also inherits from the
matching type of the standard library. It carries its facts as fields and can be pickled. Its message says what went
wrong, where, and what to do. Wrong input is a ValueError; broken invariants are plain ``assert``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STOPPED_EXIT_CODE = 143
"""Exit code of a run that was asked to end and left no checkpoint: 128 + SIGTERM; another signal gives another."""
PREEMPTED_EXIT_CODE = 75
"""Exit code of a run that was asked to end and left a complete checkpoint from which it can be resumed."""


class AsyncRLError(Exception):
    """Root of all exceptions of this package."""

    exit_code = 1
    restartable = True
    """Whether to restart an actor that ends with this error; if False, the run ends unless it can spare the actor."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only fields do not pickle by default.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[AsyncRLError], args: tuple[Any, ...], fields: dict[str, Any]) -> AsyncRLError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(AsyncRLError, ValueError):
    """The configuration is wrong. ``problems`` holds one line for each problem found.

    ``found`` is True if a check before the start found them. Each key by itself is then valid.
    """

    exit_code = 78
    restartable = False

    def __init__(self, problems: list[str], *, found: bool = False) -> None:
        self.problems, self.found = problems, found
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            super().__init__(
                f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {p}" for p in problems)
            )


class DataError(AsyncRLError, ValueError):
    """A dataset cannot be read. ``path`` and ``line`` (1-based, None for the whole file) say where.

    ``detail`` is the message without ``fix``, the advice to the user, which may be empty.
    """

    exit_code = 78
    restartable = False

    def __init__(self, what: str, *, path: str, line: int | None = None, fix: str = "") -> None:
        self.path, self.line, self.fix = path, line, fix
        self.detail = f"{path}{'' if line is None else f':{line}'}: {what}"
        super().__init__(f"{self.detail}. To do: {fix}" if fix else self.detail)


class HubRefused(AsyncRLError, RuntimeError):
    """A model cannot be uploaded to the Hugging Face hub."""

    restartable = False


class UsageError(AsyncRLError, ValueError):
    """A command, or a call of the Python API, cannot be carried out as it was given."""

    exit_code = 2
    restartable = False


class ActorFailed(AsyncRLError, RuntimeError):
    """An actor failed in a way that ends the run."""

    restartable = False

    def __init__(self, actor: str, reason: str, *, log: str | None = None, exit_code: int = 1) -> None:
        self.actor, self.reason, self.log, self.exit_code = actor, reason, log, exit_code
        super().__init__(f"{actor}: {reason}" + (f" (log: {log})" if log else ""))


class CannotLearn(ActorFailed):
    """The run ends because too many of its groups cannot be trained. No step is lost: it is raised between steps."""


class HostFailed(AsyncRLError, ConnectionError):
    """A host of the run could not be reached, or cannot take part. ``host`` is its name in the hostfile."""

    restartable = False

    def __init__(self, host: str, reason: str, *, exit_code: int = 1) -> None:
        self.host, self.reason, self.exit_code = host, reason, exit_code
        super().__init__(f"{host}: {reason}")


class EngineDied(AsyncRLError, RuntimeError):
    """An inference engine died or hangs. ``engine`` names it. Its requests are sent again, with their tokens."""

    def __init__(self, engine: str, reason: str) -> None:
        self.engine, self.reason = engine, reason
        super().__init__(f"engine {engine}: {reason}")


class WeightsCorrupt(AsyncRLError, ValueError):
    """A published version cannot be used: its bytes do not match its manifest, or the engine cannot load it or computes
    other log-probs. ``version`` and ``bucket`` (index) say where."""

    def __init__(self, what: str, *, version: int, bucket: int | None = None) -> None:
        self.version, self.bucket = version, bucket
        where = f"version {version}" + ("" if bucket is None else f", bucket {bucket}")
        super().__init__(f"weights of {where}: {what}")


class VersionGone(AsyncRLError, LookupError):
    """The weights of ``version`` are no longer held; a caller asks which versions exist."""

    code = "version_gone"

    def __init__(self, version: int, why: str = "") -> None:
        self.version = version
        super().__init__(f"version {version} of the weights is no longer held" + (f": {why}" if why else ""))


class NotHere(AsyncRLError, LookupError):
    """The host that was asked for a chunk of the weights does not have it yet; the caller asks again."""

    code = "not_here"
    retryable = True


class VersionReused(AsyncRLError, ValueError):
    """``version`` was published although ``newest`` exists: versions only grow."""

    code = "version_reused"

    def __init__(self, version: int, newest: int) -> None:
        self.version, self.newest = version, newest
        super().__init__(f"version {version} of the weights is not above {newest}; a number is never reused")


class InvalidRequest(AsyncRLError, ValueError):
    """A call asks for something that does not exist, for example bytes past the end."""

    code = "invalid"
    retryable = False


class NotLeased(AsyncRLError, PermissionError):
    """A rollouter delivers a group whose lease it does not hold, or whose lease it has changed."""

    code = "forbidden"

    def __init__(self, rollouter: str, uid: str) -> None:
        self.rollouter, self.uid = rollouter, uid
        super().__init__(f"{rollouter} does not hold the lease of {uid} that it delivers: it was leased to another")


class NotKept(AsyncRLError, OSError):
    """A request has started, but its file is not on disk yet; the caller asks again. ``file`` names it."""

    code = "not_kept"
    retryable = True

    def __init__(self, file: str) -> None:
        self.file = file
        super().__init__(f"{file} is not written yet; if its disk is full, make room")


class RestoreNeeded(AsyncRLError, RuntimeError):
    """The dataloader or the learner has started; the dataloader waits for ``Restored``."""

    code = "restore_needed"
    retryable = True

    def __init__(self) -> None:
        super().__init__("the dataloader waits for the learner to report the state of the run")


class RunChanged(AsyncRLError, ValueError):
    """A run is resumed with a change that its ledger does not allow.

    ``what`` is data, seed or batch; ``was`` and ``now`` are the values that differ.
    """

    code = "changed"
    exit_code = 78
    restartable = False

    def __init__(self, what: str, difference: str, *, was: str, now: str) -> None:
        self.what, self.difference, self.was, self.now = what, difference, was, now
        super().__init__(
            f"{difference}: was {was} when the run stopped, is {now} now; restore it, or allow it with "
            f"--allow-changed-{what}"
        )


class CheckpointError(AsyncRLError, OSError):
    """A checkpoint cannot be written or read. ``path`` says which; the last complete one stays.

    ``full`` is ENOSPC or EDQUOT where its disk has no room, else 0.
    """

    def __init__(self, path: str, reason: str, *, full: int = 0) -> None:
        self.path, self.reason, self.full = path, reason, full
        super().__init__(f"checkpoint {path}: {reason}")


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or damaged; the checkpoint before it may be whole."""


class BroadcastFailed(AsyncRLError, ConnectionError):
    """A broadcast of weights failed; any of its members may be the cause."""

    def __init__(self, version: int, reason: str) -> None:
        self.version = version
        super().__init__(f"broadcast of version {version}: {reason}")


class NonFiniteStep(AsyncRLError, ArithmeticError):
    """The loss or the gradient norm of an update is not finite, so the weights stay as they were before this update.

    ``what`` names the value that is not finite: "loss", "supervised loss", "gradient norm" or "log-probs by the
    reference". ``step`` is the number of the step, from 1; ``kind`` is "step", or "warm step" before the first one.
    ``uids`` are the prompt groups that may be the cause: those with a non-finite loss. If only the gradient norm is not
    finite, they are all groups of the update. The list is empty on a rank that does not know the groups. ``trained``
    are the groups of earlier updates of the same step, which the optimizer did take; ``metrics`` are these updates'
    metrics. If the supervised loss is not finite, ``uids`` is empty, and ``places`` are the positions of the
    conversations, as FILE:LINE.
    """

    restartable = False

    def __init__(
        self,
        what: str,
        *,
        step: int,
        uids: list[str],
        trained: Sequence[str] = (),
        metrics: Mapping[str, float] | None = None,
        places: Sequence[str] = (),
        kind: str = "step",
    ) -> None:
        self.what, self.step, self.uids, self.trained, self.metrics = what, step, uids, list(trained), metrics or {}
        self.places = list(places)
        blamed = uids or self.places
        named = ", ".join(blamed[:8]) + (f" and {len(blamed) - 8} more" if len(blamed) > 8 else "")
        taken = f"the updates before it were taken, with {len(trained)} groups" if trained else "no step was taken"
        whose = f" ({'groups' if uids else 'conversations'} {named})" if blamed else ""
        super().__init__(f"the {what} of {kind} {step} is not finite; {taken}{whose}")


class RewardFailed(AsyncRLError, RuntimeError):
    """A reward function raised, timed out, died, or returned an invalid reward."""

    code = "reward_failed"

    def __init__(self, function: str, reason: str, *, retryable: bool = True) -> None:
        self.function, self.reason, self.retryable = function, reason, retryable
        super().__init__(f"reward function {function}: {reason}")


class RewardPoolEnded(RewardFailed):
    """The pool of a reward function has ended or cannot start processes any more."""

    code = "reward_pool_ended"


class RewardBroken(AsyncRLError, RuntimeError):
    """A reward function fails in nearly every call, so nothing can be learnt. ``function`` names it."""

    code = "reward_broken"
    retryable = True
    """The trajectory is not the cause, so the actor that asks for a reward may retry. The error ends the run."""
    restartable = False

    def __init__(self, function: str, reason: str) -> None:
        self.function, self.reason = function, reason
        super().__init__(f"reward function {function} {reason}")


class TooManyFailures(AsyncRLError, RuntimeError):
    """More of a script's trajectories failed than it allows: ``lost`` of ``total``.

    ``errors`` are their errors, in order of arrival.
    """

    def __init__(self, lost: int, total: int, errors: list[Exception]) -> None:
        self.lost, self.total, self.errors = lost, total, errors
        super().__init__(
            f"{lost} of {total} trajectories are lost; the first error: {type(errors[0]).__name__}: {errors[0]}"
        )


class EpisodeWorkersEnded(AsyncRLError, RuntimeError):
    """Processes that play episodes cannot start any more, or end while they import the user's code."""

    def __init__(self, code: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"episodes of {code}: the code {reason}")


class EpisodeHostFull(AsyncRLError, RuntimeError):
    """An episode host already plays ``most`` episodes, its limit. It takes no other until one has ended."""

    code = "episode_host_full"
    retryable = True

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__(f"{most} episodes are open here, which is the limit")


class EpisodeOver(AsyncRLError, RuntimeError):
    """A call to the policy in a session that has ended or is unknown. ``reason`` says why it ended."""

    code = "episode_over"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the episode is over: {reason}")


class ChatRefused(AsyncRLError, ValueError):
    """A request that the policy cannot answer. ``field`` names the part that is wrong, ``problem`` says why."""

    code = "chat_refused"

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


class WireError(AsyncRLError, ConnectionError):
    """Root of all errors between two actors."""


class ProtocolError(WireError, ValueError):
    """A message does not follow docs/protocol.md."""


class MessageTooLarge(ProtocolError):
    """A message is larger than its receiver accepts; the sender has not sent it."""


class Refused(WireError):
    """The peer refuses this actor, as by a REFUSE. ``ours`` and ``theirs`` are the values that do not agree."""

    def __init__(self, peer: str, code: str, *, ours: str, theirs: str) -> None:
        self.peer, self.code, self.ours, self.theirs = peer, code, ours, theirs
        super().__init__(f"{peer} refuses this actor: {code} (ours {ours}, theirs {theirs})")


class PeerRestarted(WireError):
    """A call that must not be repeated was in flight when its peer restarted."""

    def __init__(self, peer: str, what: str) -> None:
        self.peer, self.what = peer, what
        super().__init__(f"{peer} restarted while {what} was in flight; it may or may not have been done")


class DeadlineExceeded(WireError, TimeoutError):
    """A wait on a peer timed out. The message names the waiting actor, the peer, the purpose and the time."""

    def __init__(self, who: str, peer: str, what: str, waited_s: float, hint: str = "") -> None:
        self.who, self.peer, self.what, self.waited_s, self.hint = who, peer, what, waited_s, hint
        super().__init__(f"{who} waited {waited_s:.1f} s on {peer} for {what}" + (f": {hint}" if hint else ""))


class RemoteError(WireError):
    """The other side answered a call with an ERROR. ``code`` is stable; a ``retryable`` call may succeed later."""

    def __init__(self, actor: str, code: str, message: str, *, retryable: bool = False) -> None:
        self.actor, self.code, self.message, self.retryable = actor, code, message, retryable
        super().__init__(f"{actor}: {code}: {message}")


def phase_word(phase: str, exit_code: int) -> str:
    """Return the word that users see for the phase of a run.

    This is the phase, except that a run that is done with an exit code was "preempted" or "stopped" before its last
    step.
    """
    if phase == "done" and exit_code:
        return "preempted" if exit_code == PREEMPTED_EXIT_CODE else "stopped"
    return phase


def phase_and_reason(phase: str, exit_code: int, reason: str) -> str:
    """Return the word for the phase, with the ``reason`` unless it is empty: ``stopped: by the launcher``."""
    word = phase_word(phase, exit_code)
    return f"{word}: {reason.removeprefix(f'{word} ')}" if reason else word

"""One rank of the learner: FSDP2 on torch.distributed (the ``fsdp2`` backend; its interface is in backend.py).

The learner actor calls the methods of rank 0. A method that needs all ranks sends a command to the other ranks, which
run ``follow``. Then all ranks work together. optimizer_updates.py has the part of a rank in a step.

Invariant: on CPU, with the same ranks and threads, the same calls give the same bits. Fails as backend.py says.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncrl.checkpoint.damage import refused
from asyncrl.config import Config
from asyncrl.config.hub import model_name
from asyncrl.core.errors import CheckpointError, ConfigError, DamagedCheckpoint, NonFiniteStep
from asyncrl.gpu.learner_memory import Checkpointing
from asyncrl.gpu.shared_gpus import NO_ENGINE, RETURN_SHARE, rank_slices, shared_engine
from asyncrl.gpu.slices import RankSlices
from asyncrl.learner.algorithm.batch import SequenceId, StepPlan
from asyncrl.learner.algorithm.losses import Objective
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.algorithm.probe_sequences import ProbeSequence
from asyncrl.learner.algorithm.scoring import ScoringPlan
from asyncrl.learner.algorithm.token_scores import TokenScores, by_sequence, count_recorded
from asyncrl.learner.algorithm.user_functions import make_objective
from asyncrl.learner.fsdp.model.lora import WithoutAdapters, target_names
from asyncrl.learner.fsdp.model.optimizers import make_optimizer
from asyncrl.learner.fsdp.model.policy import Policy
from asyncrl.learner.fsdp.optimizer_updates import (
    SUPERVISED_LOSS,
    OptimizerUpdates,
    Scorer,
    Scorers,
    StepResult,
)
from asyncrl.learner.fsdp.ranks.ranks import (
    Command,
    Gather,
    LoadCheckpoint,
    Ranks,
    Reference,
    Rest,
    Save,
    ScoreProbe,
    See,
    StopRank,
    Train,
    of_step,
    pack,
    shape_of_update,
    unpack,
)
from asyncrl.learner.fsdp.residence import Residence, wait_for_gpu_memory
from asyncrl.learner.fsdp.schedule import learning_rate, warm_learning_rate
from asyncrl.learner.fsdp.startup.loading import model_folder
from asyncrl.learner.fsdp.startup.sharding import (
    build_frozen,
    build_policy,
    choose_device,
    compute_dtype,
    limit_memory,
    prepare_device,
)
from asyncrl.learner.fsdp.startup.startup_check import Scoring
from asyncrl.learner.fsdp.utilisation import mfu
from asyncrl.learner.fsdp.weights import dcp
from asyncrl.learner.fsdp.weights.assembly import Assembly, make_copy, publish, take_part
from asyncrl.learner.fsdp.weights.export import adapter_settings, export
from asyncrl.learner.fsdp.weights.probe import score_probe
from asyncrl.learner.fsdp.weights.saver import Saver
from asyncrl.messages.routes import Experts
from asyncrl.messages.weights import Probe
from asyncrl.weights.broadcast import open_store
from asyncrl.weights.held_version import HeldVersion

_LOG = logging.getLogger(__name__)
LEAST_COMPILE_S = 0.1
"""Shortest time of torch.compile that is logged."""


def compile_seconds() -> float:
    """Time (s) that torch.compile has taken in this process."""
    # torch counts it nowhere else. The module is imported with the first graph.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return float(dynamo.calculate_time_spent()["total_wall_time"]) if dynamo is not None else 0.0


class Trainer:
    """One rank of the ``fsdp2`` backend."""

    policy: Policy
    """The model that is trained; this rank holds its shards. It exists once ``setup`` has returned."""
    checkpointing: Checkpointing
    """The kind of activation checkpointing of its layers; ``setup`` sets it."""

    def __init__(self, config: Config, rank: int) -> None:
        self.packed = self.shares_prefixes = self.skips_zero_advantages = self.on_gpu = False
        self.on_phase: Callable[[str], None] = lambda name: None
        self.rejected_speedups: list[str] = []
        self.experts: Experts | None = None
        self.token_scores: dict[SequenceId, TokenScores] = {}
        self.steps = 0
        """Number of trainer steps that the run has taken, without warm steps; a step has one update or several."""
        self.warm_steps = 0
        self._config, self._learner, self._rank = config, config.learner, rank
        self._store: TCPStore | None = None
        """On rank 0, the store that ``open_store`` has opened; else None."""
        self._joined_ranks: Ranks | None = None
        """The connection to the other ranks; None before ``setup`` and after ``stop``."""
        self._slices: RankSlices | None = None
        """This rank's side of its GPU, if an engine has the GPU in turn; None otherwise, and before ``setup``."""
        self.engines_in_turn = 0
        self.is_resting = False
        self.gpu_wait_s = 0.0
        self._took_gpu_s = 0.0
        """Seconds that the present command took to get this rank's GPU back."""
        self._compile_s = 0.0
        """Time (s) of torch.compile that earlier lines of the log have reported."""

    @property
    def _ranks(self) -> Ranks:
        assert self._joined_ranks is not None, "setup comes first"
        return self._joined_ranks

    def open_store(self, host: str) -> tuple[str, int]:
        self._store = open_store(host, self._learner.collective_timeout_s, self._config.network.ports)
        return host, self._store.port

    def setup(self, host: str, port: int) -> None:
        """Meet the other ranks, load and shard the models, and create optimizer, saver and assembly.

        In time slices it first takes the GPU and waits, for a limited time, for room in its memory.
        """
        device = choose_device(self._learner, self._rank)
        self._slices = rank_slices(self._config, self._rank)
        if self._slices is not None:
            self._slices.open()
            self._slices.take()
        prepare_device(device, self._learner)
        shares = limit_memory(device, self._config)
        if self._slices is not None and shares is not None:
            wait_for_gpu_memory(
                device, shares.rank, RETURN_SHARE * self._learner.collective_timeout_s, self._pause_for_room
            )
        self._joined_ranks = Ranks(
            self._rank,
            self._learner.ranks,
            host,
            port,
            device=device,
            timeout_s=self._learner.collective_timeout_s,
            replicas=self._learner.replicas,
            context_parallel=self._learner.context_parallel,
            store=self._store,
        )
        if self._config.placement.share == "time_slice":
            numbers = self._ranks.all_gather([shared_engine()], "the engines that share their GPUs")
            self.engines_in_turn = len(set(numbers.ravel()) - {NO_ENGINE})
        self.on_gpu = device.type == "cuda"
        self._dtype = compute_dtype(self._learner, device)
        self.policy, scoring, self.checkpointing = build_policy(self._config, self._ranks, self._dtype, shares)
        self.packed, self.shares_prefixes = scoring.packed, scoring.shared
        self._note_warnings(scoring, "model.path")
        self.experts = self.policy.routers.experts if self._learner.routes != "ignore" else None
        self.policy.routes = self._learner.routes
        if self._learner.balance:
            if not self.policy.routers.has_balance:
                problem = "the model has no experts, or transformers has no load-balance loss for it"
                raise ConfigError([f"learner.balance: {problem}; set it to 0"])
            self.policy.routers.keep_logits()
        self._parameters = list(self.policy.parameters())
        self._optimizer = make_optimizer(self.policy, self._config)
        self._residence = Residence(self._state_tensors, device)
        objective = make_objective(self._learner)
        self.skips_zero_advantages = objective.skips_zero_advantages
        self._scorers = self._build_scorers(objective)
        self._updates = OptimizerUpdates(
            self.policy, self._scorers, self._optimizer, self._ranks, objective, self._learner, self._enter_phase
        )
        self._saver = Saver(self._ranks)
        self._assembly = Assembly(
            self.policy,
            self._ranks,
            dtype=self._dtype,
            bucket_bytes=self._config.weights.bucket_bytes,
            adapters_alone=self._config.publishes_adapter,
            make_copy=(lambda size: make_copy(size, device)) if shares is not None and shares.has_copy else None,
        )

    def _state_tensors(self) -> Iterator[Tensor]:
        """Yield the weights, their gradients, the buffers and the optimizer's states."""
        yield from self.policy.buffers()
        for parameter in self._parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for states in self._optimizer.state.values():
            yield from (value for value in states.values() if isinstance(value, Tensor))

    def _send(self, command: Command) -> None:
        """Rank 0: send a command to the other ranks. Ends a rest: takes this rank's GPU back from the engine."""
        self.is_resting = False
        self._ranks.commands.send(command)
        self._take_gpu()

    def _take_gpu(self) -> None:
        """In time slices: wait until the engine on this rank's GPU sleeps, and move everything back to the GPU."""
        self._took_gpu_s = 0.0
        if self._slices is not None and not self._slices.has:
            began = time.monotonic()
            with self._phase("take the GPU"):
                self._slices.take()
                self._residence.come_back(RETURN_SHARE * self._learner.collective_timeout_s, self._pause_for_room)
            self._took_gpu_s = time.monotonic() - began
            self.gpu_wait_s += self._took_gpu_s

    def _count_slowest(self) -> None:
        """All ranks together: let ``gpu_wait_s`` count the wait of the slowest rank before the present command.

        ``_take_gpu`` has already added this rank's own wait.
        """
        if self.engines_in_turn:
            waits = self._ranks.all_gather([self._took_gpu_s], "the waits for their GPUs")
            self.gpu_wait_s += float(waits.max()) - self._took_gpu_s

    def _pause_for_room(self, seconds: float) -> None:
        """Wait before the next look at the GPU's free memory; ``interrupt`` ends the wait with RuntimeError."""
        assert self._slices is not None
        self._slices.pause(seconds, "room in the memory")

    def rest(self) -> None:
        if self.engines_in_turn and not self.is_resting:
            self.is_resting = True
            self._ranks.commands.send(Rest())
            self._give_gpu()

    def _give_gpu(self) -> None:
        """In time slices: move everything to host memory, and let the engine have the GPU."""
        if self._slices is not None and self._slices.has:
            # Layers that FSDP has left gathered would keep their memory.
            self.policy.reshard()
            self._residence.leave()
            self._slices.give()

    def _note_warnings(self, scoring: Scoring, key: str) -> None:
        self.rejected_speedups += [f"start-up check of {key}: {warning}" for warning in scoring.warnings]

    def _build_scorers(self, objective: Objective) -> Scorers:
        """Load the frozen models that the objective or the rewards need.

        With adapters and no learner.kl.path, the policy without its adapters is the reference.
        """

        def frozen(key: str, path: str | None) -> Policy:
            assert path is not None
            policy, scoring = build_frozen(key, path, self._config, self._ranks, self._dtype, packed=self.packed)
            # The frozen model scores the policy's rows, so prefixes are shared only if both models support it.
            self.shares_prefixes = self.shares_prefixes and scoring.shared
            self._note_warnings(scoring, key)
            # The routes are those of the policy. A teacher has learned to choose experts for itself.
            same_experts = policy.routers.experts == self.policy.routers.experts
            policy.routes = self._learner.routes if key == "learner.kl.path" and same_experts else "ignore"
            return policy

        kl, teacher = self._learner.kl, self._learner.teacher
        reference: Scorer | None = None
        if objective.needs_reference or kl.in_reward:
            if self._config.sft.warm_steps and kl.path is None:
                # Only a user's own loss gets here: the configuration is checked for the other losses.
                why = "which is model.path by default. But sft.warm_steps change the policy before the first step"
                problem = f"the loss {self._learner.loss} asks for a reference, {why}"
                raise ConfigError([f"learner.kl.path: {problem}; name the folder of a reference"])
            if self._config.lora.is_on and kl.path is None:
                reference = WithoutAdapters(self.policy)
            else:
                reference = frozen("learner.kl.path", kl.path or self._config.model.path)
        return Scorers(
            reference,
            frozen("learner.teacher", teacher) if objective.traits.teacher and not self._learner.teacher_url else None,
        )

    def train(self, plan: StepPlan) -> dict[str, float]:
        """Rank 0: send the other ranks their micro-batches, and take the step with them.

        Returns the step's metrics; empty for a plan without updates, which does nothing. Raises NonFiniteStep for a
        refused update. For a loss the error names the groups or conversations to blame: all of the update if no cause
        was found. For the gradient norm it names all groups of the update. It also names the groups that earlier
        updates have trained.
        """
        self.token_scores = {}
        if not plan.updates:
            # An optimizer step without a gradient would still move the weights by momentum.
            return {}
        buffers = self._pack([of_step(plan, group) for group in range(self._learner.row_groups)])
        command = Train(
            buffer_bytes=[len(buffer) for buffer in buffers],
            updates=[shape_of_update(update) for update in plan.updates],
            temperature=plan.temperature,
            fresh=plan.fresh,
            warm=plan.warm,
        )
        self._send(command)
        kind, step = self._next_step(plan.warm)
        self._ranks.scatter(buffers, 0, f"the batch of {kind} {step}")
        # The buffers have been sent. Rank 0 takes its own micro-batches from the plan.
        del buffers
        began = time.monotonic()
        result = self._step(command, of_step(plan, 0))
        self._log_compiling(f"{kind} {step}")
        # The refused update was computed too; no later one was.
        done = plan.updates if result.refused is None else plan.updates[: result.refused.update + 1]
        tokens = sum(update.tokens for update in done)
        metrics = result.metrics | self._utilisation(tokens, time.monotonic() - began)
        if result.refused is None:
            self.token_scores = by_sequence(plan, self._collect_scores(result, plan))
            return metrics
        refused, update = result.refused, plan.updates[result.refused.update]
        uids, places = update.uids, list[str]()
        if refused.what == SUPERVISED_LOSS:
            assert update.supervised is not None
            named = [update.supervised.places[i] for i in refused.sequences]
            uids, places = [], list(dict.fromkeys(named or update.supervised.places))
        elif refused.sequences:
            uids = list(dict.fromkeys(update.sequences[i].uid for i in refused.sequences))
        trained = [uid for earlier in plan.updates[: refused.update] for uid in earlier.uids]
        raise NonFiniteStep(
            refused.what, kind=kind, step=step, uids=uids, places=places, trained=trained, metrics=metrics
        )

    def score(self, plan: ScoringPlan) -> list[np.ndarray]:
        buffers = self._pack(plan.ranks)
        tokens = [sum(len(batch.predict) for batch in batches) for batches in plan.ranks]
        command = Reference([len(buffer) for buffer in buffers], max(tokens), plan.temperature)
        self._send(command)
        self._ranks.scatter(buffers, 0, "a batch to be scored")
        values = self._score_batches(command, plan.ranks[0])
        # Ranks that share rows have the same values.
        of_groups = values[:: self._learner.context_parallel]
        return plan.in_order([row[:count] for row, count in zip(of_groups, tokens, strict=True)])

    def _score_batches(self, command: Reference, batches: Sequence[MicroBatch]) -> np.ndarray:
        """All ranks together: score each rank's micro-batches with the reference model.

        Returns log-probs, float64 [world size, command.tokens], nats: each rank's values, padded with 0.
        """
        name = "scoring by the reference"
        self._count_slowest()
        with self._phase(name):
            scored = self._updates.refer(batches, command.temperature)
            own = np.concatenate([values.cpu().numpy() for values in scored])
            return self._ranks.all_gather([*own.tolist(), *[0.0] * (command.tokens - len(own))], name)

    def _collect_scores(self, result: StepResult, plan: StepPlan | None) -> list[np.ndarray]:
        """All ranks together, after a step: send the scores of recorded tokens (token_scores.py) to rank 0.

        Rank 0 passes the ``plan``, and gets the scores of each row group: float32 [2, M]. The other ranks pass None and
        get an empty list.
        """
        sharing, sizes = self._learner.context_parallel, None
        # Ranks that share rows have the same scores, so only the first of them sends any.
        own = result.scores[:, : 0 if self._rank % sharing else None]
        if plan is not None:
            sizes = [0] * self._learner.ranks
            sizes[::sharing] = count_recorded(plan)
        return self._ranks.collect(np.ascontiguousarray(own), sizes, "the scores of recorded tokens")[::sharing]

    def _next_step(self, warm: bool) -> tuple[str, int]:
        """Return the kind of the next step ("step" or "warm step"), and its number among this kind, from 1."""
        return ("warm step", self.warm_steps + 1) if warm else ("step", self.steps + 1)

    def _log_compiling(self, step: str) -> None:
        """Log the time of torch.compile since the last such line; the first line includes the check at start."""
        seconds = compile_seconds()
        if seconds - self._compile_s >= LEAST_COMPILE_S:
            _LOG.info("torch.compile took %.1f s up to the end of %s", seconds - self._compile_s, step)
            self._compile_s = seconds

    def _utilisation(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return ``perf/mfu`` for ``tokens`` trained by all ranks; empty on a CPU, or if the GPU's peak is unknown."""
        if not self.on_gpu:
            return {}
        share = mfu(
            parameters=self.policy.count_active(trained=False),
            trained=self.policy.count_active(trained=True),
            tokens=tokens,
            seconds=seconds,
            devices=self._ranks.world_size,
            device_name=torch.cuda.get_device_name(self._ranks.device),
        )
        return {"perf/mfu": share} if share is not None else {}

    def probe(self, sequences: Sequence[ProbeSequence]) -> Probe | None:
        if not sequences:
            return None
        self._send(ScoreProbe(list(sequences)))
        return self._score_probe(sequences)

    def publish(self, version: int, probe: Probe | None = None) -> Future[HeldVersion]:
        self._send(Gather("version"))
        with self._phase("copy"):
            copy = self._assembly.gpu_copy
            return self._assembly.begin("version", lambda gathered: publish(gathered, version, probe=probe, copy=copy))

    def export(self, folder: Path) -> None:
        self._send(Gather("export"))
        source, model, lora = model_folder(self._config.model), self.policy.model, self._config.lora
        settings = None
        if lora.is_on:
            settings = adapter_settings(lora, model=model_name(self._config), targets=target_names(model, lora))
        self._assembly.begin(
            "export", lambda gathered: export(gathered, source, folder, self._dtype, adapter=settings)
        ).result()

    def checkpoint_bytes(self) -> int:
        return dcp.expected_bytes(self.policy, self._optimizer)

    def export_bytes(self) -> int:
        return sum(parameter.numel() * self._dtype.itemsize for parameter in self._parameters)

    def sees(self, folder: Path) -> None:
        """Rank 0: write a file, and raise CheckpointError unless every rank sees it."""
        probe = folder / f".probe-{uuid.uuid4().hex}"
        try:
            probe.touch()
        except OSError as error:
            raise refused(folder, error) from error
        try:
            self._send(See(str(probe)))
            problems = self._check_visible(probe)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        if problems:
            raise CheckpointError(str(folder), f"checkpoint.dir must be seen by all ranks: {', '.join(problems)}")

    def save(self, folder: Path) -> Future[None]:
        assert not self._saver.busy, "the one before must have ended"
        command = Save(str(folder), renew=self._saver.broken)
        self._send(command)
        return self._save(command)

    def load(self, folder: Path) -> None:
        self._send(LoadCheckpoint(str(folder)))
        self._load(folder)

    def follow(self) -> None:
        """Ranks above 0: take part in each command of rank 0, until StopRank or an interrupt."""
        while (command := self._ranks.commands.next()) is not None:
            if isinstance(command, Rest):
                self._give_gpu()
                continue
            # A rank that stops does not need the GPU.
            if not isinstance(command, StopRank):
                self._take_gpu()
            if isinstance(command, Train):
                self._follow_step(command)
            elif isinstance(command, Reference):
                # The micro-batches get no local name, so that their memory is freed before the next command.
                self._score_batches(command, self._receive(command.buffer_bytes, "a batch to be scored"))
            elif isinstance(command, Gather):
                with self._phase("copy"):
                    self._assembly.begin(command.purpose, take_part)
            elif isinstance(command, ScoreProbe):
                self._score_probe(command.sequences)
            elif isinstance(command, See):
                self._check_visible(Path(command.path))
            elif isinstance(command, Save):
                # The other ranks ignore the future: the result of the save reaches rank 0 (dcp.write).
                self._save(command)
            elif isinstance(command, LoadCheckpoint):
                # Nothing has changed; rank 0 gets the same error and may load another checkpoint.
                with contextlib.suppress(DamagedCheckpoint):
                    self._load(Path(command.folder))
            else:
                return

    def _follow_step(self, command: Train) -> None:
        """Ranks above 0: receive micro-batches, take the step with them, and send the recorded scores to rank 0."""
        kind, step = self._next_step(command.warm)
        result = self._step(command, self._receive(command.buffer_bytes, f"the batch of {kind} {step}"))
        if result.refused is not None:
            raise NonFiniteStep(result.refused.what, kind=kind, step=step, uids=[])
        self._collect_scores(result, None)

    def _pack(self, of_groups: Sequence[Sequence[MicroBatch]]) -> list[np.ndarray]:
        """Pack each row group's micro-batches into a buffer for each of its ranks.

        Rank 0 has its own already, so its buffer is empty.
        """
        of_ranks = [batches for batches in of_groups for _ in range(self._learner.context_parallel)]
        return [np.empty(0, np.uint8), *map(pack, of_ranks[1:])]

    def _receive(self, buffer_bytes: Sequence[int], what: str) -> list[MicroBatch]:
        """Receive this rank's micro-batches from rank 0; ``buffer_bytes`` has the size of each rank's buffer."""
        return unpack(self._ranks.scatter(None, buffer_bytes[self._rank], what))

    def interrupt(self) -> None:
        if self._slices is not None:
            self._slices.interrupt()
        if self._joined_ranks is not None:
            self._joined_ranks.commands.interrupt()

    def stop(self) -> None:
        if self._joined_ranks is not None:
            if self._rank == 0:
                self._ranks.commands.send(StopRank())
            # ``setup`` may have failed before it made the saver and the assembly.
            if hasattr(self, "_assembly"):
                self._assembly.close()
                self._saver.close()
            self._joined_ranks.close()
            self._joined_ranks = None
        if self._slices is not None:
            self._slices.close()
        self._store = None

    def _enter_phase(self, name: str) -> None:
        # Looked up at each call: the actor sets ``on_phase`` after it has made this backend.
        self.on_phase(name)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Context that reports a phase of this rank's work to ``on_phase``."""
        self.on_phase(name)
        try:
            yield
        finally:
            self.on_phase("")

    def _check_visible(self, path: Path) -> list[str]:
        """All ranks together: return a problem for each rank that does not see the file ``path``."""
        problem = None if path.exists() else f"learner/{self._rank} does not see a file that learner/0 wrote there"
        return self._ranks.agree(problem, "the folder of checkpoints")

    def _save(self, command: Save) -> Future[None]:
        return self._saver.save(
            Path(command.folder),
            self.policy,
            self._optimizer,
            steps=self.steps,
            warm_steps=self.warm_steps,
            renew=command.renew,
        )

    def _load(self, folder: Path) -> None:
        contents = dcp.load(folder, self.policy, self._optimizer, self._ranks)
        self.steps, self.warm_steps = contents.steps, contents.warm_steps

    def _score_probe(self, sequences: Sequence[ProbeSequence]) -> Probe:
        truncation = self._config.rollout.truncation
        with self._ranks.waiting("scoring the probe"), self._phase("probe"):
            return score_probe(
                self.policy,
                sequences,
                temperature=self._config.rollout.temperature,
                packed=self.packed,
                device=self._ranks.device,
                # Twice the largest set of tokens to sample from: engine and learner may differ about its last tokens.
                least=0 if truncation is None else 2 * truncation.top_k,
            )

    def _step(self, command: Train, batches: Sequence[MicroBatch]) -> StepResult:
        """All ranks together: take a step with this rank's micro-batches.

        The result is the same on all ranks, except its ``scores``. The step counts unless its first update is refused.
        The optimizer's state is cleared after the last warm step and before the first step of the run.
        """
        self._count_slowest()
        kind, step = self._next_step(command.warm)
        sft = self._config.sft
        if not command.warm and not self.steps:
            # A run that resumes with fewer warm steps may not have reached the reset after the last one, below.
            self._optimizer.state.clear()
        try:
            result = self._updates.step(
                f"{kind} {step}",
                command.updates,
                batches,
                temperature=command.temperature,
                fresh=command.fresh,
                rate=warm_learning_rate(step, self._learner, sft)
                if command.warm
                else learning_rate(step, self._learner),
            )
        finally:
            self.on_phase("")
        # A step counts if at least its first update was taken.
        if result.refused is not None and not result.refused.update:
            return result
        if command.warm:
            self.warm_steps += 1
            if self.warm_steps == sft.warm_steps:
                # The run begins with a fresh optimizer.
                self._optimizer.state.clear()
        else:
            self.steps += 1
        return result

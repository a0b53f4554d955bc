"""The prompts of a run: the sources of training, the evaluation sets, and the files that grow.

Reading and tokenizing block, so they run on threads. Invariant: ids, text and row of an index never change. Appended
rows get the next indices, and are leased only from an epoch on that has not begun (prompt_queue.py).

Fails with DataError or ConfigError, as ``prompts`` does. While the run lives, a bad row in a growing file ends the
dataloader with DataError, unless on_bad_row is "skip"; so does a file that has become shorter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.config import Config
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.training import EvalConfig, PromptsConfig, SourceConfig
from asyncrl.data.rows import EpochOrder, GrowingFile
from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.holders import PromptLease
from asyncrl.dataloader.prompt_queue import PromptSource
from asyncrl.dataloader.prompts import PromptSet, collect, follows, growing_file, load_dataset
from asyncrl.messages.groups import Lease
from asyncrl.rpc.services import ActorServices
from asyncrl.text.tokenizer import Tokenizer

TOKENIZED_AT_ONCE = 2000
"""Number of prompts tokenized before the actor reports progress and may be cancelled."""


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A source of training prompts."""

    name: str
    """Its name in a mixture; empty for the only set."""
    prompts: PromptSet
    source: PromptSource
    """The same prompts as the queue sees them."""
    file: GrowingFile | None = None


class RunPrompts:
    """All prompts of a run: those of training, and those of each evaluation set."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.training: list[TrainingSet] = []
        """The sources, in the order of the configuration; complete once ``read`` has returned."""
        self.evals: dict[str, PromptSet] = {}

    @property
    def grow(self) -> bool:
        """Whether a file of training prompts may grow."""
        return any(each.file is not None for each in self.training)

    @property
    def count(self) -> int:
        """Number of training prompts read so far."""
        return sum(len(each.prompts) for each in self.training)

    async def read(self, tokenizer: Tokenizer, services: ActorServices) -> None:
        """Read and tokenize all prompts on threads. Raises DataError or ConfigError."""
        for key, data in self._config.training_sets.items():
            file = growing_file(data) if follows(data) else None
            prompts = await self._read(key, data, tokenizer, services, file)
            order = EpochOrder(prompts.fingerprint, self._config.run.seed, len(prompts), shuffle=data.shuffle)
            source = PromptSource(order, prompts.oversize, prefix=prompts.fingerprint_at if file is not None else None)
            if isinstance(data, SourceConfig):
                source.weight = data.weight
            self.training.append(TrainingSet(data.source_name, prompts, source, file))
        for name, evaluation in self._config.eval.items():
            self.evals[name] = await self._read(f"eval.{name}.data", evaluation.data, tokenizer, services)

    async def _read(
        self,
        key: str,
        data: PromptsConfig,
        tokenizer: Tokenizer,
        services: ActorServices,
        file: GrowingFile | None = None,
    ) -> PromptSet:
        """Read and tokenize one set; logs it, and notifies the user of rows that are left out."""
        if file is not None:
            dataset = await asyncio.to_thread(lambda: collect(data.path or "", file.read(), data))
        else:
            dataset = await asyncio.to_thread(load_dataset, data)
        prompts = PromptSet(dataset, data, tokenizer, self._config)
        while not await asyncio.to_thread(prompts.tokenize, TOKENIZED_AT_ONCE):
            services.progress()
        services.log.info(
            "prompts are ready",
            data=key,
            prompts=len(prompts),
            too_long=len(prompts.oversize),
            bad_rows=prompts.skipped,
            fingerprint=prompts.fingerprint,
        )
        for remark in prompts.remarks(key):
            services.notify(f"{remark.kind}/{key}", f"{key}: {remark.detail}. To do: {remark.fix}")
        return prompts

    async def read_appended(self) -> bool:
        """Read the rows appended to growing files since the last call. Returns whether there are any.

        Raises DataError.
        """
        has_grown = False
        for each in self.training:
            if each.file is None:
                continue
            rows = await asyncio.to_thread(each.file.read)
            await asyncio.to_thread(each.prompts.extend, rows)
            size, source = len(each.prompts), each.source
            if size > source.order.size:
                source.order = replace(source.order, size=size, fingerprint=each.prompts.fingerprint_at(size))
                has_grown = True
        return has_grown

    def sample(self, count: int) -> list[np.ndarray]:
        """Token ids of ``count`` training prompts (or all, if fewer), evenly spread over the data; always the same."""
        admissible = [(each.prompts, index) for each in self.training for index in each.prompts.admissible]
        count = min(count, len(admissible))
        chosen = [admissible[i * len(admissible) // count] for i in range(count)]
        return [prompts.prompt(index)[0] for prompts, index in chosen]

    def lease(self, lease: PromptLease) -> Lease:
        """The message that leases a prompt to a rollouter, with its tokens and sampling settings; not yet sealed."""
        prompt, rollout = lease.prompt, self._config.rollout
        sampling: RolloutConfig | EvalConfig = rollout
        if isinstance(prompt, EvalPrompt):
            prompts, sampling = self.evals[prompt.name], self._config.eval[prompt.name]
            source = sampling.data.source_name
            purpose, epoch, samples = f"eval/{prompt.name}", prompt.version, sampling.n
        else:
            training = self.training[prompt.epoch % len(self.training)]
            prompts, source = training.prompts, training.name
            purpose, epoch, samples = "train", prompt.epoch, rollout.samples_per_prompt
        ids, text, row = prompts.prompt(prompt.index)
        return Lease(
            uid=prompt.uid,
            number=lease.number,
            purpose=purpose,
            epoch=epoch,
            index=prompt.index,
            param_version=lease.param_version,
            attempt=lease.attempt,
            prompt_ids=ids,
            prompt=text,
            row=row,
            samples=samples,
            temperature=sampling.temperature,
            truncation=rollout.truncation,
            max_tokens=sampling.max_tokens or rollout.max_tokens,
            source=source,
        )

"""Train with the plain synchronous loop: the parts of a run, without actors, sockets or two things at the same time.

    python -m tools.synchronous CONFIG... [--learner.lr 1e-4 ...]

For each version: take prompts in order, sample all responses of a prompt, score them, leave out groups without signal
and take the next prompt instead, until there are enough; train; load the new weights into the engine. On the reference
engine a run with staleness.max = 0 has the same tokens, losses and weights in every bit. Writes metrics.jsonl, samples/
and export/ to the folder run.dir/run.name, which must not exist. One process, so one learner rank; no evaluation.

It plays episodes of functions alone, in this process, without limits of turns, context or time. A call continues the
answer that its messages repeat; the tokens of that answer are not encoded again. Each answer without a continuation
makes one sequence, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.load import load_config
from asyncrl.core.errors import ConfigError
from asyncrl.data.rows import EpochOrder
from asyncrl.dataloader.prompts import PromptSet, load_dataset
from asyncrl.episodes.playing import players
from asyncrl.episodes.playing.client import Reply, Task
from asyncrl.learner.algorithm.advantages import has_signal
from asyncrl.learner.algorithm.batch import step_metrics
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.learner.fsdp.trainer import Trainer
from asyncrl.learner.loop.step_planner import plan_step
from asyncrl.learner.metrics.record_files import RecordFiles
from asyncrl.messages.groups import Group, Lease, Trajectory, Turn, VersionSpan
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.messages.reward import Completion, Score, read_outcome
from asyncrl.messages.token_sets import TokenSets, join_sets
from asyncrl.reward.reward_worker import RewardSetup, resolve
from asyncrl.rollouter.engines import make_engine
from asyncrl.rollouter.engines.base import Engine, GenerationRequest
from asyncrl.rollouter.episode.player import first_messages, task_seed
from asyncrl.rollouter.serving.generation import Response, request_seed
from asyncrl.text.chat.renderer import Renderer, make_renderer
from asyncrl.text.stops import Stops, resolve_stops
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of

Ask = Callable[[str, list[int]], Awaitable[Response]]
"""Samples a continuation of token ids, with the noise of a key."""


def train(config: Config, runner: asyncio.Runner, engine: Engine, trainer: Trainer, records: RecordFiles) -> None:
    learner, reward = config.learner, config.reward
    tokenizer = tokenizer_of(config)
    stops = resolve_stops(config.rollout, tokenizer)
    dataset = load_dataset(config.data)
    prompts = PromptSet(dataset, config.data, tokenizer, config)
    prompts.tokenize(len(dataset.rows))
    order = EpochOrder(prompts.fingerprint, config.run.seed, len(prompts), shuffle=config.data.shuffle)
    places = (place for place in map(order.at, itertools.count()) if place[1] not in prompts.oversize)
    scorer = resolve(RewardSetup(reward.function, reward.per, reward.options, reward.max_memory_bytes), runner)
    plan = partial(plan_step, config=config, backend=trainer, advantage=find_advantage(config.learner))
    episode = None
    if function := config.episode.function:
        player = players.resolve("function", [function], config.episode.options, lambda *_: None)
        episode = partial(play, player, make_renderer(config, tokenizer), config)
    runner.run(load(engine, trainer, version=0))
    for version in range(learner.steps // learner.steps_per_version):
        batch, filtered = list[Group](), list[Group]()
        while len(batch) < config.groups_per_version:
            lease = make_lease(config, prompts, version, *next(places))
            ask = partial(sample_tokens, config, engine, tokenizer, stops, lease)
            respond_to = episode or partial(respond, tokenizer)
            responses = [runner.run(respond_to(ask, lease, sample)) for sample in range(lease.samples)]
            if episode is None:
                said = [Completion(text=r.text, finish_reason=r.finish_reason, tokens=0) for r in responses]
                task = Score(uid=lease.uid, prompt=lease.prompt, row=lease.row, completions=said)
                for response, outcome in zip(responses, scorer(task), strict=True):
                    response.reward, response.components = outcome
            group = Group(lease=lease, trajectories=responses)
            signal = not learner.dynamic_sampling or has_signal(group, learner)
            (batch if signal else filtered).append(group)
            if len(filtered) > learner.max_filtered_ratio * learner.groups_per_step:
                raise RuntimeError(f"no signal in {len(filtered)} groups of version {version}")
        for groups in (batch, filtered):
            groups.sort(key=lambda group: (group.lease.epoch, group.lease.index))
        for first in range(0, len(batch), learner.groups_per_step):
            groups = batch[first : first + learner.groups_per_step]
            step, rest = trainer.steps + 1, filtered if first == 0 else []
            planned = plan(groups, version=version, fresh=first == 0, step=step)
            if not planned.sequences:
                raise RuntimeError(f"every trajectory of step {step} is masked")
            metrics = step_metrics(groups, rest, version, config)
            line = {"kind": "train", **metrics, **planned.metrics, **trainer.train(planned), "step": trainer.steps}
            newest = trainer.steps // learner.steps_per_version
            if newest > version:
                runner.run(load(engine, trainer, newest))
            line |= {"weights/version": newest, "ledger/trained": trainer.steps * learner.groups_per_step}
            records.metrics(line)
            recorded = groups[: config.run.samples_per_step]
            records.samples(trainer.steps, newest, recorded, scores=trainer.token_scores)
            if records.error is not None:
                raise records.error


def make_lease(config: Config, prompts: PromptSet, version: int, epoch: int, index: int) -> Lease:
    ids, text, row = prompts.prompt(index)
    fields: dict[str, Any] = config.rollout.model_dump(include={"temperature", "max_tokens"})
    fields |= {"truncation": config.rollout.truncation}
    fields |= {"samples": config.rollout.samples_per_prompt, "prompt_ids": ids, "prompt": text, "row": row}
    fields |= {"uid": f"{epoch}-{index}", "epoch": epoch, "index": index, "param_version": version}
    return Lease(number=0, purpose="train", **fields)


async def sample_tokens(
    config: Config, engine: Engine, tokenizer: Tokenizer, stops: Stops, lease: Lease, key: str, ids: list[int]
) -> Response:
    """Response of the policy behind ``ids``, with the noise of ``key``."""
    limit, seed = lease.max_tokens, request_seed(config.run.seed, key)
    request = GenerationRequest(
        id=key,
        prompt_ids=ids,
        max_tokens=limit,
        temperature=lease.temperature,
        truncation=lease.truncation,
        seed=seed,
        stop_token_ids=stops.token_ids,
    )
    response = Response(max_tokens=limit, stops=stops)
    response.submitted(lease.param_version)
    async for delta in engine.generate(request):
        if response.finish_reason is None:
            response.extend(delta.tokens, delta.logprobs, tokenizer.decode, delta.sets)
        if delta.finish_reason is not None:
            response.end_submission(delta.finish_reason, delta.spans)
    return response


async def respond(tokenizer: Tokenizer, ask: Ask, lease: Lease, sample: int) -> Trajectory:
    """A response to a prompt, not scored yet."""
    response = await ask(f"{lease.uid}/{sample}/1", lease.prompt_ids.tolist())
    assert response.finish_reason is not None
    return Trajectory(
        sample=sample,
        sequences=[
            TokenSequence(
                tokens=np.array(response.tokens, np.int32),
                logprobs=np.array(response.logprobs, np.float32),
                spans=response.spans,
                sets=response.sets,
            )
        ],
        finish_reason=response.finish_reason,
        text=tokenizer.decode(response.tokens),
    )


@dataclass(eq=False)
class Answer:
    """A call of the policy, and what it answered."""

    path: list[Answer]
    """The answers before it, and itself."""
    number: int
    context: list[int] = field(default_factory=list)
    """Tokens behind the answer before."""
    response: Response | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages it was asked with, and its own."""

    def ids(self) -> list[int]:
        """Token ids up to its end."""
        return [id for each in self.path for id in (*each.context, *(each.response.tokens if each.response else ()))]


class Play:
    """The client of one episode."""

    def __init__(self, renderer: Renderer, ask: Ask) -> None:
        self.answers: list[Answer] = []
        self._renderer, self._ask = renderer, ask
        self._asked: Counter[str] = Counter()

    async def chat(self, messages: Sequence[Mapping[str, Any]]) -> Reply:
        """Answer a call, as Client does."""
        asked = [dict(message) for message in messages]
        known = [each for each in self.answers if each.messages and asked[: len(each.messages)] == each.messages]
        last = max(known, key=lambda each: len(each.messages), default=None)
        answer = Answer([], len(self.answers))
        if last is not None and last.response is not None:
            tail = asked[len(last.messages) :]
            context = self._renderer.extension(tail, (), {}, last_ids=last.response.tokens)
            assert context is not None, "the template allows it"
            answer.path, answer.context = [*last.path, answer], context
        else:
            answer.path, answer.context = [answer], self._renderer.render(asked, (), {})
        self.answers.append(answer)
        prompt = answer.ids()
        digest = hashlib.blake2b(np.array(prompt, np.int32).tobytes(), digest_size=8).hexdigest()
        self._asked[digest] += 1
        answer.response = response = await self._ask(f"{digest}/{self._asked[digest]}", prompt)
        content = self._renderer.parse(response.tokens, ()).content
        answer.messages = [*asked, {"role": "assistant", "content": content}]
        return Reply(content, None, [], "stop", len(prompt), len(response.tokens))

    def sequences(self) -> list[TokenSequence]:
        """The sequences to train: each answer once, in the first sequence that has it."""
        inner = {above for each in self.answers for above in each.path[:-1]}
        leaves = [each for each in self.answers if each not in inner]
        leaves.sort(key=lambda leaf: [(np.array(each.context, np.int32).tobytes(), each.number) for each in leaf.path])
        held: set[Answer] = set()
        found = []
        for leaf in leaves:
            tokens: list[int] = []
            logprobs: list[float] = []
            sets: list[TokenSets | None] = []
            spans: list[VersionSpan] = []
            turns: list[Turn] = []
            for each in leaf.path:
                assert each.response is not None
                if each is not leaf.path[0]:
                    spans.append(VersionSpan(-1, len(tokens), len(tokens) + len(each.context), role="context"))
                    tokens += each.context
                begin = len(tokens)
                tokens += each.response.tokens
                if each in held:
                    spans.append(VersionSpan(-1, begin, len(tokens), role="repeated"))
                    continue
                held.add(each)
                logprobs += each.response.logprobs
                sets.append(each.response.sets)
                spans += [VersionSpan(s.version, begin + s.start, begin + s.end) for s in each.response.spans]
                turns.append(Turn(begin, len(tokens), 0.0))
            arrays = {"tokens": np.array(tokens, np.int32), "logprobs": np.array(logprobs, np.float32)}
            prompt_ids = np.array(leaf.path[0].context, np.int32)
            made = TokenSequence(prompt_ids=prompt_ids, spans=spans, turns=turns, sets=join_sets(sets), **arrays)
            found.append(made)
        return found


async def play(
    player: players.Player, renderer: Renderer, config: Config, ask: Ask, lease: Lease, sample: int
) -> Trajectory:
    """An episode and its reward."""
    seed, where = task_seed(config.run.seed, lease.uid), f"{lease.uid}/{sample}/0"
    messages, tools = first_messages(config, lease)
    said: Any = {"prompt": lease.prompt, "messages": messages, "tools": tools, "row": lease.row}
    task = Task(**said, seed=seed, uid=lease.uid, sample=sample, attempt=0)
    client: Any = Play(renderer, lambda key, ids: ask(f"{where}/{key}", ids))
    reward, components = read_outcome(await player(task, client))
    last = client.answers[-1]
    return Trajectory(
        sample=sample,
        sequences=client.sequences(),
        messages=last.messages,
        finish_reason="length" if last.response.finish_reason == "length" else "stop",
        text=last.messages[-1]["content"],
        reward=reward,
        components=components,
    )


async def load(engine: Engine, trainer: Trainer, version: int) -> None:
    """Bring the trainer's weights to the engine."""
    await engine.pause("wait")
    with trainer.publish(version).result() as new:
        await engine.load(new, recompute_kv=True)
    await engine.resume()


def main(arguments: Sequence[str]) -> None:
    files = [argument for argument in arguments if argument.endswith(".toml")]
    flags = [argument.removeprefix("--") for argument in arguments if not argument.endswith(".toml")]
    config = load_config(files, dict(zip(flags[::2], flags[1::2], strict=True)))
    if config.learner.ranks != 1 or config.reward.truncated == "penalty" or config.sft.is_on:
        raise ConfigError(["the plain loop has one learner rank, no penalty for length and no conversations"])
    if config.data.mixture or config.data.curriculum.is_on or config.data.follow:
        raise ConfigError(["the plain loop has one set of prompts, no curriculum and no file that grows"])
    if config.learner.teacher_url is not None:
        raise ConfigError(["the plain loop asks no server for a teacher"])
    run_dir = Path(config.run.dir) / config.run.name
    run_dir.mkdir(parents=True)
    with asyncio.Runner() as runner:
        # Before the engine, which has torch compute on one thread from there on where nothing was computed before.
        trainer, engine = Trainer(config, rank=0), make_engine(config, "rollouter/0")
        trainer.setup(*trainer.open_store("127.0.0.1"))
        try:
            runner.run(engine.start())
            train(config, runner, engine, trainer, RecordFiles(run_dir, start=1))
            trainer.export(run_dir / "export")
        finally:
            runner.run(engine.close())
            trainer.stop()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The vLLM engine with adapters (LoRA) on CPU: exactness over updates, refusals, updates under running requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from published_weights import stage
from rollouter.engines.changing import EPISODES, LEAVES_CONTEXTS, TOLERANCE, Changing, check, config_for
from rollouter.engines.engine_cases import PROMPT, ask, collect, load, worst
from tiny_adapters import ALPHA, RANK, make_adapter, with_adapter
from tiny_models import Publisher, logprobs_of, make_model, parameters_of, save_model

from asyncrl.errors import ConfigError, WeightsCorrupt
from asyncrl.lora import tensor_names
from asyncrl.messages.groups import VersionSpan
from asyncrl.messages.weights import Manifest
from asyncrl.rollouter.engines.vllm.engine import VllmEngine
from asyncrl.weights.staging import StagedVersion

pytestmark = [pytest.mark.slow, *LEAVES_CONTEXTS]

RUNNER = asyncio.Runner()
RUN = RUNNER.run
Adapter = dict[str, torch.Tensor]


@dataclass
class Served:
    """An engine, its base model and its folder, and what publishes adapters."""

    engine: VllmEngine
    base: Any
    folder: Path
    publisher: Publisher
    versions: Iterator[int]

    def stage(self, adapter: Adapter) -> StagedVersion:
        return stage(self.publisher.publish(next(self.versions), adapter))

    async def load(self, adapter: Adapter) -> int:
        return await load(self.engine, self.publisher.publish(next(self.versions), adapter))

    async def check_exact(self, adapter: Adapter, version: int) -> None:
        """Sampled and scored log-probs are those of the base with this adapter; without it they are far from them."""
        answer = await collect(self.engine, ask(seed=version, max_tokens=24))
        expected = logprobs_of(with_adapter(self.base, adapter), PROMPT + answer.tokens)
        assert worst(answer.logprobs, expected[len(PROMPT) - 1 :]) < TOLERANCE
        assert worst(await self.engine.score(PROMPT), expected[: len(PROMPT) - 1]) < TOLERANCE
        assert worst(logprobs_of(self.base, PROMPT), expected[: len(PROMPT) - 1]) > 0.1
        assert answer.spans == [VersionSpan(version, 0, len(answer.tokens))]


def serve(folder: Path, **lora: Any) -> Iterator[Served]:
    base = make_model(0)
    config = config_for(save_model(folder, base), lora={"rank": RANK, "alpha": ALPHA, **lora})
    engine, publisher = VllmEngine(config, "rollouter/0"), Publisher()
    try:
        RUN(engine.start())
        yield Served(engine, base, folder, publisher, iter(range(10**6)))
    finally:
        RUN(engine.close())
        publisher.close()
        gc.collect()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("model"))
    RUNNER.close()


async def test_updates_are_exact_and_read_no_weights_of_the_base(served):
    """The files of the base are gone after the first of them, and no version holds a weight of it."""
    checksums = set()
    for number in range(8):
        adapter = make_adapter(served.base, number)
        assert not adapter.keys() & parameters_of(served.base).keys()
        await served.check_exact(adapter, await served.load(adapter))
        checksums.add(await served.engine.checksum())
        for file in served.folder.glob("*.safetensors"):
            file.rename(file.with_suffix(".gone"))
    assert len(checksums) == 8
    for file in served.folder.glob("*.gone"):
        file.rename(file.with_suffix(".safetensors"))


class ChangingAdapters(Changing):
    """A host whose adapter changes between two."""

    def __init__(self, served: Served, **rollout: Any) -> None:
        super().__init__(served.engine, served.versions, **rollout)
        self.adapters = [make_adapter(served.base, seed) for seed in (101, 102)]
        self.models = [with_adapter(served.base, adapter) for adapter in self.adapters]

    def publish(self, version: int, model: Any) -> Manifest:
        return self.publisher.publish(version, self.adapters[self.models.index(model)])


@pytest.mark.parametrize("on_update", ["abort_resume", "keep"])
async def test_requests_in_flight_go_on_with_the_new_adapter(served, on_update):
    changing = ChangingAdapters(served, on_update=on_update)
    found = await changing.run()
    assert check(changing, found) >= EPISODES / 2


def lacking(adapter: Adapter, *names: str) -> Adapter:
    return {name: tensor for name, tensor in adapter.items() if name not in names}


A, B = tensor_names("model.layers.1.self_attn.k_proj")


@pytest.mark.parametrize(("first", "told"), [(True, "no name of an adapter's tensor"), (False, "1 parameters are unk")])
async def test_other_adapters_are_refused_before_a_pause(served, first, told, monkeypatch):
    """The first version is held against the model's files, later ones against the first."""
    good = make_adapter(served.base, 5)
    await served.load(good)
    if first:
        monkeypatch.setattr(served.engine, "_layout", None)
    wrong = served.stage(good | {"model.norm.weight": torch.zeros(64)})
    with closing(wrong), pytest.raises(WeightsCorrupt, match=told):
        await served.engine.accept(wrong)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda adapter: {name.replace("k_proj", "x_proj"): each for name, each in adapter.items()}, "has no place"),
        (lambda adapter: lacking(adapter, A), "only one of two matrices"),
        (lambda adapter: adapter | {A: adapter[A][1:].clone(), B: adapter[B][:, 1:].clone()}, "one and the same"),
    ],
    ids=["name", "half", "rank"],
)
async def test_what_the_worker_cannot_place_leaves_it_paused_until_an_update_is_whole(served, spoil, told):
    adapter = make_adapter(served.base, 6)
    await served.load(make_adapter(served.base, 7))
    await served.engine.pause("abort")
    for _ in range(2):
        with closing(served.stage(spoil(adapter))) as staged, pytest.raises(WeightsCorrupt, match=told):
            await served.engine.load(staged, recompute_kv=True)
    with closing(served.stage(adapter)) as staged:
        await served.engine.load(staged, recompute_kv=True)
    await served.engine.resume()
    await served.check_exact(adapter, staged.version)


def test_an_adapter_of_some_layers_leaves_the_others_alone(tmp_path):
    """q and v without the k between them; a new engine serves base and newest adapter."""
    some = ["q_proj", "v_proj", "down_proj"]

    async def check_some(served: Served) -> None:
        adapter = make_adapter(served.base, 8, some)
        for _ in range(2):
            next(served.versions)
        await served.check_exact(adapter, await served.load(adapter))
        everywhere = make_adapter(served.base, 8)
        with closing(served.stage(everywhere)) as staged, pytest.raises(WeightsCorrupt, match="are unknown"):
            await served.engine.accept(staged)

    for served in serve(tmp_path, targets=some):
        RUN(check_some(served))


def test_a_rank_above_vllms_largest_is_refused():
    with pytest.raises(ConfigError, match=r"lora\.rank: is 513, and vLLM takes adapters up to 512"):
        config_for("unused", lora={"rank": 513})

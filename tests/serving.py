"""vLLM's engine of one model after the other in one process, fed by the worker's own methods.

    python tests/serving.py ANSWERS < REQUESTS

A request is a Job as a line of JSON, and each line of ANSWERS is a Served. Starting vLLM for each model costs far more
than its engine's work. Here it is imported once, and the engine's core runs in this process. The AsyncLLM around it
depends on no model and has tests of its own.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import msgspec

from asyncrl.config.load import validate_config
from asyncrl.rollouter.engines.vllm.options import engine_arguments, environment


class Job(msgspec.Struct, frozen=True):
    """A model, its weights in turn, and the requests under each of them."""

    folder: str
    manifests: list[str]
    """As the worker gets them."""
    scored: list[list[int]]
    """Sequences that are scored."""
    prompts: list[list[int]]
    """Each is continued by ``max_tokens`` that are sampled."""
    max_tokens: int
    extra: dict[str, Any] = {}
    """rollout.vllm.extra."""
    lora: dict[str, Any] = {}
    """The configuration's section; where it is given the manifests are of adapters."""


class Version(msgspec.Struct, frozen=True):
    """Answers under one set of weights."""

    scores: list[list[float]]
    """Log-probs of each scored sequence from its second token on."""
    tokens: list[list[int]]
    logprobs: list[list[float]]
    experts: list[list[list[list[int]]]] = []
    """Experts of each continued sequence: [position, layer, choice], if the engine reports them."""


class Served(msgspec.Struct, frozen=True):
    """A version for each manifest, or the error."""

    versions: list[Version] = []
    problem: str = ""


def config_of(folder: str, extra: dict[str, Any], lora: dict[str, Any]) -> Any:
    """The configuration of a run on CPU."""
    vllm = {"cpu_kv_cache_bytes": 16 << 20, "threads": 1, "max_num_seqs": 8, "extra": extra}
    return validate_config(
        {
            "model": {"path": folder},
            "data": {"source": "synthetic", "max_prompt_tokens": 128},
            "lora": lora,
            "rollout": {"gpus_per_replica": 0, "max_tokens": 128, "vllm": vllm},
        }
    )


def serve(job: Job) -> Served:
    """Start an engine for it, load, ask, end it."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.inputs import tokens_input

    from asyncrl.rollouter.engines.vllm.launch import adapter_request

    def chosen(entries: Any) -> list[float]:
        return [float(value) for value in entries.logprobs]

    score = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    sample = SamplingParams(
        max_tokens=job.max_tokens, logprobs=0, flat_logprobs=True, detokenize=False, ignore_eos=True
    )
    llm: Any = None
    try:
        config = config_of(job.folder, job.extra, job.lora)
        arguments = engine_arguments(config, "rollouter/0")
        adapter = adapter_request(config, job.folder)
        llm = LLM(**arguments)
        versions = []
        for manifest in job.manifests:
            scaling = config.lora.alpha / config.lora.rank if job.lora else None
            answers = llm.collective_rpc("load_version", kwargs={"manifest": manifest, "scaling": scaling})
            assert [failure for failure, _ in answers] == [""], answers
            assert llm.reset_prefix_cache()
            scored, sampled = (
                llm.generate([tokens_input(ids) for ids in asked], parameters, use_tqdm=False, lora_request=adapter)
                for asked, parameters in ((job.scored, score), (job.prompts, sample))
            )
            done = [output.outputs[0] for output in sampled]
            versions.append(
                Version(
                    scores=[chosen(output.prompt_logprobs) for output in scored],
                    tokens=[list(each.token_ids) for each in done],
                    logprobs=[chosen(each.logprobs) for each in done],
                    experts=[
                        each.routed_experts.tolist()
                        for each in done
                        if getattr(each, "routed_experts", None) is not None
                    ],
                )
            )
        return Served(versions)
    except Exception as error:
        return Served(problem=f"{type(error).__name__}: {error}")
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def main(path: str) -> None:
    first = True
    with open(path, "wb") as answers:
        for line in sys.stdin.buffer:
            job = msgspec.json.decode(line, type=Job)
            if first:
                for variable, value in environment(config_of(job.folder, {}, {})).items():
                    os.environ.setdefault(variable, value)
                first = False
            answers.write(msgspec.json.encode(serve(job)) + b"\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])

"""The real vLLM's OpenAI server as a teacher: what it is asked, it answers; on CPU."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from quick import needs_vllm

from asyncrl.config.algorithm import TeacherServerConfig
from asyncrl.config.load import validate_config
from asyncrl.launcher.checks.scoring_models import check_server
from asyncrl.learner.groups.teacher import TeacherClient
from asyncrl.text.tokenizer import load_tokenizer
from tools.bench.tiny_model import make_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(600)]
START_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "model"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "8"]
    # Its log-probs are held against float64 ones.
    argv += ["--dtype", "float32"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # As our own engines: what it would compile for the first log-probs wants a compiler.
    environment["TORCHDYNAMO_DISABLE"] = "1"
    with log.open("w") as out:
        server = subprocess.Popen(argv, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        until = time.monotonic() + START_S
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait(30)


def config_of(folder, url):
    tree = {
        "model": {"path": str(folder)},
        "data": {"source": "synthetic", "max_prompt_tokens": 64},
        "rollout": {"gpus_per_replica": 0, "max_tokens": 64},
        "learner": {"loss": "distill", "teacher": url},
    }
    return validate_config(tree)


def test_log_probs_of_the_teacher_are_the_models_at_temperature_1(folder, url):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 95, length).tolist() for length in (2, 40, 200)]

    async def ask():
        client = TeacherClient(url, TeacherServerConfig())
        try:
            places = [np.arange(1, len(ids), 1 + len(ids) // 20) for ids in sequences]
            # Twice: what a prefix cache keeps must not cost log-probs.
            for _ in range(2):
                found = await asyncio.gather(*map(client.logprobs, sequences, places))
            return places, found
        finally:
            await client.close()

    for ids, places, found in zip(sequences, *asyncio.run(ask()), strict=True):
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1).numpy()
        expected = logp[places - 1, np.array(ids)[places]]
        assert np.abs(found - expected).max() < 1e-4


def test_a_vllm_teacher_passes_the_check_before_the_start(folder, url):
    found = asyncio.run(check_server(url, config_of(folder, url), load_tokenizer(str(folder))))
    assert found.result == "ok", found

"""A run ends with the reason if its engine samples from another distribution than the learner assumes."""

import string
from contextlib import closing

import pytest
from quick import needs_vllm
from tiny_models import EOS, VOCAB, sharp_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tools.live_run import ROOT, LiveRun

pytestmark = [pytest.mark.slow, needs_vllm]

RUN_S, STEPS = 240.0, 8
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
COOLER = """
from vllm.v1.sample.logits_processor import LogitsProcessor


class Cooler(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits.div_(0.9)
"""


def test_a_run_whose_engine_cools_its_logits_ends_with_the_reason(tmp_path):
    assert len(CHARACTERS) == VOCAB and CHARACTERS[EOS] == "\n"
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\n").save_pretrained(tmp_path / "model")
    model = sharp_model(0)
    model.generation_config = GenerationConfig(eos_token_id=EOS)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i} + {i + 7} = "}}\n' for i in range(64)))
    (tmp_path / "cooler.py").write_text(COOLER)
    (tmp_path / "rewards.py").write_text("def share(*, completion):\n    return completion.count('1') / 32\n")
    vllm = {"cpu_kv_cache_bytes": 64 << 20, "threads": 1, "extra": {"logits_processors": ["cooler:Cooler"]}}
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "prompts.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"gpus_per_replica": 0, "samples_per_prompt": 4, "max_tokens": 32, "vllm": vllm},
        "reward": {"function": "rewards:share", "workers": 1},
        "learner": {"steps": STEPS, "groups_per_step": 4, "lr": 1e-4, "dynamic_sampling": False},
    }
    with closing(LiveRun(tree, tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})) as run:
        assert run.wait(RUN_S) == 1, run.output
        for words in ("rollouter/0", "another temperature than rollout.temperature", "drift.stop = "):
            assert words in run.output, run.output
        assert run.step < STEPS

"""The configuration: merging, flags, and every problem reported at once with its path."""

from operator import attrgetter

import msgspec
import pytest
from run_settings import SIMULATED

from asyncrl.config.keys import known_keys
from asyncrl.config.load import config_from_json, config_to_json, load_config, validate_config
from asyncrl.config.training import JUDGES
from asyncrl.core.errors import ConfigError
from asyncrl.core.other_names import NAMES, meaning_of
from asyncrl.core.states import OF_ACTORS
from asyncrl.core.truncation import LARGEST_SET, Truncation
from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.learner.actor import Learner
from asyncrl.learner.publishing.publisher import collective_backend
from asyncrl.messages import Uid
from asyncrl.reward.functions import JUDGES as REWARD_JUDGES
from asyncrl.rollouter.actor import Rollouter
from asyncrl.rpc.actor import Actor


def problems(tree):
    with pytest.raises(ConfigError) as caught:
        validate_config(tree)
    return caught.value.problems


def test_files_merge_left_to_right_and_flags_come_last(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    # A byte order mark is not part of a file.
    first.write_text('\ufeff[model]\npath = "m"\n[data]\npath = "d"\n[rollout]\nstop = ["a", "b"]\nmax_tokens = 5\n')
    second.write_text('[rollout]\nstop = ["c"]\n[eval.held.data]\npath = "e"\n')
    config = load_config([first, second], {"learner.lr": "3e-6", "run.name": "trial", "rollout.max_tokens": "7"})
    assert config.rollout.stop == ["c"]
    assert (config.rollout.max_tokens, config.learner.lr, config.run.name) == (7, 3e-6, "trial")
    assert config.eval["held"].data.path == "e"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("run.name", "2026", "2026"),
        ("run.name", '"2026"', "2026"),
        ("eval.held.data.path", "7", "7"),
        ("reward.options.answer_key", "7", 7),
        ("learner.lr", "1e-3", 1e-3),
    ],
)
def test_the_flag_of_a_text_key_is_always_text(key, text, value):
    tree = {"rollout.engine": "sim", "learner.backend": "sim", "data.source": "synthetic"}
    config = load_config([], tree | {"eval.held.data.source": "synthetic", key: text}).model_dump()
    for part in key.split("."):
        config = config[part]
    assert config == value and type(config) is type(value)


def test_concurrency_is_a_number_or_the_limit_of_the_engine():
    def bounds(**rollout):
        return validate_config(SIMULATED | {"rollout": {"engine": "sim"} | rollout}).rollout.concurrency_bounds

    assert bounds(concurrency=12) == (12, 12)
    assert bounds(concurrency="auto") == (1, 1024)
    # Calls take places in the engine, not episodes.
    few = {"rollout": {"engine": "sim", "concurrency": 2, "samples_per_prompt": 8}, "episode": {"function": "p:f"}}
    assert validate_config(SIMULATED | few).rollout.concurrency == 2
    real = {"model": {"path": "m"}, "data": {"source": "synthetic"}}
    chosen = validate_config(real | {"rollout": {"concurrency": "auto", "vllm": {"max_num_seqs": 48}}})
    assert chosen.rollout.concurrency_bounds == (1, 48)
    assert load_config([], {**{"data.source": "synthetic", "model.path": "m"}, "rollout.concurrency": "auto"})


@pytest.mark.parametrize(
    ("rollout", "truncation"),
    [
        ({}, None),
        ({"top_p": 0.9}, Truncation(top_p=0.9, top_k=LARGEST_SET)),
        ({"top_k": 20, "min_p": 0.1}, Truncation(top_k=20, min_p=0.1)),
    ],
)
def test_any_key_truncates_the_distribution_and_bounds_the_sets(rollout, truncation):
    real = {"model": {"path": "m"}, "data": {"source": "synthetic"}}
    assert validate_config(real | {"rollout": rollout}).rollout.truncation == truncation


def test_every_problem_is_reported_at_once():
    found = problems(
        {
            "learner": {"lrr": 1, "ranks": "x", "backend": "fsdp2"},
            "evl": {},
            "rollout": {"engine": "sim", "on_update": "restart"},
            "eval": {"held": {"at_stat": True, "data": {"source": "jsonl"}}},
        }
    )
    text = "\n".join(found)
    for expected in (
        "learner.ranks: input should be a valid integer",
        "learner.lrr: unknown key; did you mean lr?",
        "evl: unknown key; did you mean eval?",
        "rollout.on_update: input should be 'abort_resume', 'keep' or 'drain' (got 'restart')",
        "eval.held.at_stat: unknown key; did you mean at_start?",
        "model.path: is required",
        "learner.backend: the sim engine makes up its tokens, which must not train a model",
        "data.path: is required",
        "eval.held.data.path: is required",
    ):
        assert expected in text
    assert len(found) == 9


def test_an_unknown_key_does_not_hide_problems_of_keys_that_begin_with_its_letters():
    found = "\n".join(problems({"weight": 1, "weights": {"stage_deadline_s": 60.0}}))
    assert "weight: unknown key" in found
    assert "weights.stage_deadline_s: must be at least weights.deadline_s" in found


SIM = {"engine": "sim"}
VLLM, FP8 = {"engine": "vllm"}, {"vllm": {"quantization": "fp8"}}
ON_CPU = VLLM | {"gpus_per_replica": 0}
ROWS, OTHERS = {"name": "rows", "path": "r.jsonl"}, {"name": "others", "source": "synthetic"}
WRONG = [
    ({"data": {"source": [ROWS | {"weight": 0.0}]}}, "data.source.0.weight: input should be greater than 0"),
    ({"data": {"source": [{"path": "r.jsonl"}]}}, "data.source.0.name: is required"),
    ({"data": {"source": [ROWS, OTHERS | {"pth": "x"}]}}, "data.source.1.pth: unknown key; did you mean path?"),
    ({"data": {"source": []}}, "data.source: list should have at least 1 item"),
    ({"data": {"source": [ROWS, OTHERS | {"name": "rows"}]}}, "data.source: 2 sources have the name 'rows'"),
    ({"data": {"source": [{"name": "rows"}]}}, "data.source.rows.path: is required"),
    ({"data": {"source": [ROWS], "path": "p.jsonl"}}, "data.path: has no effect beside [[data.source]]"),
    ({"data": {"source": [ROWS], "follow": True}}, "data.follow: has no effect beside [[data.source]]"),
    ({"data": {"source": [ROWS | {"episode": "a:b"}]}}, "data.source.0.episode: all sources share [episode]"),
    ({"data": {"source": [ROWS | {"advantage": "grpo"}]}}, "data.source.0.advantage: all sources share learner.adv"),
    ({"data": {"source": [ROWS | {"max_tokens": 8}]}}, "data.source.0.max_tokens: all sources share rollout.max_to"),
    ({"data": {"source": [ROWS | {"reward": "rubric"}]}}, "data.source.rows.reward: is a judge"),
    (
        {"data": {"source": [ROWS | {"reward": "exact"}]}, "reward": {"function": "rubric"}},
        "data.source.rows.reward: does not go with a judge",
    ),
    ({"data": {"source": [ROWS | {"reward": "episode"}]}}, "data.source.rows.reward: episode is for runs with"),
    ({"data": {"source": [ROWS | {"reward_options": {"a": 1}}]}}, "data.source.rows.reward_options: are for a reward"),
    ({"data": {"source": [ROWS | {"reward": "reasoning_gym"}]}}, "data.source.rows.reward: reasoning_gym scores"),
    ({"data": {"source": [ROWS | {"system": "s"}]}}, 'data.source.rows.system: needs template = "chat"'),
    ({"data": {"source": [OTHERS | {"follow": True}]}}, "data.source.others.follow: is for one file of JSON lines"),
    ({"data": {"path": "*.jsonl", "follow": True, "source": "auto"}}, "data.follow: is for one file of JSON lines"),
    ({"data": {"curriculum": {"rest": 20}}}, "data.curriculum.rest: is more than data.curriculum.longest = 16"),
    ({"data": {"curriculum": {"solved": 0.9}}}, "data.curriculum.solved: has no effect without data.curriculum.rest"),
    ({"data": {"curriculum": {"function": "f"}}}, "data.curriculum.function: is 'f', and must be MODULE:FUNCTION"),
    (
        {"data": {"curriculum": {"function": "m:f", "rest": 1}}},
        "data.curriculum.rest: has no effect beside data.curriculum.function",
    ),
    ({"data": {"curriculum": {"options": {"a": 1}}}}, "data.curriculum.options: are for data.curriculum.function"),
    ({"eval": {"a": {"data": {"source": [ROWS]}}}}, "eval.a.data.source: input should be 'auto'"),
    ({"eval": {"a": {"data": OTHERS}}}, "eval.a.data.name: unknown key"),
    (
        {"data": {"source": [ROWS]}, "eval": {"a": {"data": {"path": "e.jsonl", "mixture_source": "no"}}}},
        "eval.a.data.mixture_source: is 'no'; the sources are ",
    ),
    (
        {"eval": {"a": {"data": {"path": "e.jsonl", "mixture_source": "no"}}}},
        "eval.a.data.mixture_source: is 'no'; there is no [[data.source]]",
    ),
    ({"rollout": SIM | {"concurrency": 4}}, "rollout.concurrency: is 4, less than one prompt group"),
    ({"rollout": {"engine": "reference", "concurrency": "auto"}}, "rollout.concurrency: auto needs the engine's"),
    ({"rollout": SIM | {"replicas": 2, "min_replicas": 3}}, "rollout.min_replicas: is more than"),
    ({"rollout": SIM | {"top_p": 0.9}}, "rollout.top_p: the sim engine cannot truncate the distribution"),
    (
        {"rollout": ON_CPU | {"top_k": 20}},
        "rollout.top_k: on CPUs vLLM does not return the tokens",
    ),
    (
        {"rollout": ON_CPU | {"min_p": 0.1}},
        "rollout.min_p: on CPUs vLLM does not return the tokens",
    ),
    ({"rollout": ON_CPU | FP8}, "rollout.vllm.quantization: engines on CPUs have no fast kernels for fp8"),
    ({"rollout": VLLM | FP8, "learner": {"dtype": "float32"}}, "rollout.vllm.quantization: vLLM quantizes weights in"),
    (
        {"rollout": VLLM | {"vllm": {"quantization": "fp8", "extra": {"quantization": "mxfp8"}}}},
        "rollout.vllm.quantization: rollout.vllm.extra has a quantization too",
    ),
    ({"rollout": {"engine": "reference", "top_p": 0.0}}, "rollout.top_p: input should be greater than 0"),
    ({"rollout": {"engine": "reference", "top_k": 1025}}, "rollout.top_k: input should be less than or equal to 1024"),
    ({"rollout": {"engine": "reference", "min_p": 1.0}}, "rollout.min_p: input should be less than 1"),
    (
        {"rollout": {"top_p": 0.9, "max_tokens": 65536}},
        "rollout.top_k: the token sets of a group may have 2147483648 bytes (1024 tokens in each set)",
    ),
    (
        {"rollout": {"top_p": 0.9}, "learner": {"loss": "distill", "teacher": "http://h:1/v1"}},
        "rollout.top_p: a teacher on a server scores under the whole distribution",
    ),
    ({"rollout": SIM | {"episodes": 64}}, "rollout.episodes: is for episodes"),
    (
        {"learner": {"ranks": 4, "context_parallel": 3}},
        "context_parallel: is 3, which does not divide learner.ranks = 4",
    ),
    ({"learner": {"ranks": 2, "context_parallel": 2, "packing": "off"}}, 'learner.packing: is "off", but ranks share'),
    ({"learner": {"backend": "sim", "steps": 5, "steps_per_version": 2}}, "learner.steps: must be a multiple"),
    ({"learner": {"backend": "sim", "steps": 5, "warmup_steps": 6}}, "learner.warmup_steps: is more"),
    ({"learner": {"lr": float("nan")}}, "learner.lr: input should be"),
    ({"weights": {"transport": "nccl"}}, "weights.transport: nccl reaches engines on GPUs"),
    ({"weights": {"stage_deadline_s": 60.0}}, "weights.stage_deadline_s: must be at least weights.deadline_s"),
    ({"network": {"ports": "9-2"}}, "network.ports: '9-2' is not a range"),
    ({"network": {"ports": "99999"}}, "network.ports: '99999' is not a range"),
    ({"network": {"host": "10.0.0.1"}, "security": {"curve": "off"}}, "security.curve: may be off on loopback"),
    ({"supervision": {"unreachable_s": 2.0}}, "supervision.unreachable_s: must be at least 3 * supervision.hea"),
    ({"watchdog": {"stall_s": 2.0}}, "watchdog.stall_s: must be at least 3 * supervision.heartbeat_s = 3"),
    ({"reward": {"per": "group", "on_timeout": -1.0}}, "reward.on_timeout"),
    ({"reward": {"on_timeout": float("nan")}}, "reward.on_timeout"),
    ({"reward": {"on_timeout": [1]}}, "reward.on_timeout: input should be 'fail' (got [1])"),
    ({"reward": {"on_timeout": {"a": 1}}}, "reward.on_timeout: input should be a valid number (got {'a': 1})"),
    ({"lora": {"targets": ["a", 5]}}, "lora.targets: input should be a valid string (got 5)"),
    ({"reward": {"truncated": "penalty", "overlong": {"margin_tokens": 9999}}}, "overlong.margin_tokens"),
    ({"data": {"source": "reasoning_gym"}}, "data.task: is required"),
    (
        {"episode": {"function": "p:f"}, "rollout": SIM | {"episodes": 4, "samples_per_prompt": 8}},
        "rollout.episodes: is 4, less than one prompt group needs (samples_per_prompt = 8)",
    ),
    ({"episode": {"options": {"a": 1}}}, "episode.options: are for episode.function, env or tools"),
    ({"episode": {"command": ["a"], "options": {"a": 1}}}, "episode.options: are not given to a command"),
    ({"episode": {"command": ["a"], "env": "p:E"}}, "env and command are both set"),
    ({"episode": {"env": "p:E", "max_request_bytes": 1 << 31}}, "episode.max_request_bytes: must be at most"),
    ({"trace": {"window_s": True}}, "trace.window_s: input should be a valid number (got True)"),
    ({"run": {"seed": "7"}}, "run.seed: input should be a valid integer (got '7')"),
    (
        {"sinks": {"prometheus": True}},
        "sinks.prometheus: is a table (got True); its keys are sinks.prometheus.enabled,",
    ),
    # A table that is absent by default.
    (
        {"learner": {"correction": {"reject": {"limt": 1.0}}}},
        "correction.reject.limt: unknown key; did you mean limit?",
    ),
]
TRAINED = {
    "model": {"path": "m"},
    "data": {"source": "synthetic"},
    "rollout": {"gpus_per_replica": 0},
    "lora": {"rank": 8},
}
WRONG_WITH_ADAPTERS = [
    ({"lora": {"rank": 0, "alpha": 16.0}}, "lora.alpha: has no effect without adapters; set lora.rank"),
    ({"lora": {"rank": 0, "publish": "merged"}}, "lora.publish: has no effect without adapters"),
    ({"lora": {"targets": []}}, "lora.targets: is empty"),
    ({"learner": {"backend": "sim"}}, 'lora.rank: learner.backend = "sim" trains nothing'),
    (
        {"rollout": {"engine": "reference"}, "lora": {"publish": "adapter"}},
        "lora.publish: is adapter, which the engine",
    ),
    ({"weights": {"transport": "gloo"}}, "weights.transport: is gloo, a broadcast"),
]


@pytest.mark.parametrize(
    ("of", "tree", "problem"),
    [*((SIMULATED, *wrong) for wrong in WRONG), *((TRAINED, *wrong) for wrong in WRONG_WITH_ADAPTERS)],
    ids=[problem for _, problem in WRONG + WRONG_WITH_ADAPTERS],
)
def test_conflicting_keys_are_named(of, tree, problem):
    merged = {key: of.get(key, {}) | tree.get(key, {}) for key in of | tree}
    assert any(problem in line for line in problems(merged)), problems(merged)


@pytest.mark.parametrize(
    ("keys", "least", "named"),
    [
        ({}, 525, "420 s (supervision.start_timeout_s + rollout.engine_timeout_s)"),
        ({"supervision": {"start_timeout_s": 60}}, 300, "240 s (weights.deadline_s + rollout.engine_timeout_s)"),
        (
            {"supervision": {"start_timeout_s": 60}, "rollout": {"on_update": "drain", "engine_timeout_s": 20}},
            325,
            "260 s (2 * weights.deadline_s + rollout.engine_timeout_s)",
        ),
    ],
)
def test_a_rank_waits_for_its_gpu_for_longer_than_an_engine_may_keep_it(keys, least, named):
    def tree(share, collective_timeout_s):
        rollout = SIMULATED["rollout"] | keys.get("rollout", {})
        learner = SIMULATED["learner"] | {"collective_timeout_s": collective_timeout_s}
        return SIMULATED | keys | {"rollout": rollout, "learner": learner, "placement": {"share": share}}

    validate_config(tree("time_slice", least))
    validate_config(tree("auto", least - 1))
    [problem] = problems(tree("time_slice", least - 1))
    assert (
        problem.startswith("learner.collective_timeout_s: ")
        and named in problem
        and f"set it to {least} or more" in problem
    )


@pytest.mark.parametrize(
    ("engine", "publish", "adapter"),
    [("vllm", "auto", True), ("vllm", "merged", False), ("reference", "auto", False)],
)
def test_a_run_with_adapters_publishes_adapters_or_merged_weights(engine, publish, adapter):
    tree = TRAINED | {"rollout": {"engine": engine, "gpus_per_replica": 0}, "lora": {"rank": 8, "publish": publish}}
    config = validate_config(tree | ({} if adapter else {"weights": {"transport": "gloo"}}))
    assert config.publishes_adapter == adapter
    assert collective_backend(config, on_gpu=True) == (None if adapter else "gloo")
    assert not validate_config(tree | {"lora": {}}).publishes_adapter
    on_gpu = validate_config(TRAINED | {"rollout": {"gpus_per_replica": 1}, "lora": {}})
    assert collective_backend(on_gpu, on_gpu=True) == "nccl"


def test_a_problem_names_its_file_or_flag(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("[learner]\nlrr = 1\n[evl.held]\nn = 1\n[rollout]\nstop = [1, '']\n[data]\nseed = -1\n")
    second.write_text('[learner]\nsteps_per_version = 2\n[data]\nsource = "synthetic"\nseed = -2\n')
    with pytest.raises(ConfigError) as caught:
        load_config([first, second], {"run.seeed": "1", "rollout.engine": "sim", "learner.backend": "sim"})
    assert {problem.partition(":")[0]: problem.rpartition(" ")[2] for problem in caught.value.problems} == {
        "learner.lrr": f"({first})",
        "evl": f"({first})",
        "rollout.stop.0": f"({first})",
        "rollout.stop.1": f"({first})",
        "data.seed": f"({second})",
        "run.seeed": "(--run.seeed)",
    }
    second.write_text("[learner]\nsteps_per_version = 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config([second], {"data.source": "synthetic", "learner.steps": "5"})
    without, found = caught.value.problems
    assert without.startswith("model.path: is required") and not without.endswith(")")
    assert found == "learner.steps: must be a multiple of learner.steps_per_version = 2 (--learner.steps)"


def test_budgets_of_single_states_extend_the_defaults():
    chosen = validate_config(SIMULATED | {"watchdog": {"budgets_s": {"training": 9.0, "starting": 7.0}}})
    assert chosen.watchdog.budgets_s == {
        "starting": 7.0,
        "waking": 600.0,
        "checkpointing": 1800.0,
        "exporting": 1800.0,
        "training": 9.0,
    }


def test_every_state_of_an_actor_may_have_a_budget():
    assert {Actor.kind, Learner.kind, Rollouter.kind} == set(OF_ACTORS)
    with pytest.raises(ConfigError, match=r"watchdog\.budgets_s\.trainin: input should be 'starting', "):
        validate_config(SIMULATED | {"watchdog": {"budgets_s": {"trainin": 9.0}}})


def test_prompts_of_a_named_set_have_uids_for_any_number_of_prompts():
    longest = "n" * 150
    assert longest in validate_config(SIMULATED | {"eval": {longest: {"data": {"source": "synthetic"}}}}).eval
    uid = EvalPrompt(longest, version=2**63, index=2**63).uid
    assert msgspec.convert(uid, Uid) == uid
    with pytest.raises(ConfigError, match=r"eval\.n+: string should match pattern"):
        validate_config(SIMULATED | {"eval": {longest + "n": {"data": {"source": "synthetic"}}}})


def test_betas_of_adamw_are_below_1():
    with pytest.raises(ConfigError, match=r"learner\.betas"):
        validate_config(SIMULATED | {"learner": {"backend": "sim", "betas": [0.9, 1.0]}})


def test_an_unreadable_file_is_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[learner\n")
    with pytest.raises(ConfigError, match="broken.toml: not valid TOML"):
        load_config([broken])
    with pytest.raises(ConfigError, match="missing.toml: cannot be read: No such file"):
        load_config([tmp_path / "missing.toml"])


def test_every_key_is_documented():
    keys = known_keys()
    assert len(keys) > 100
    assert [key for key, _, _, description in keys if not description.endswith((".", ")", "?"))] == []


TRAINING = {"path": "t.jsonl", "template": "chat", "system": "Be brief.", "prompt_key": "q", "max_prompt_tokens": 77}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, TRAINING | {"path": "e.jsonl"}),
        ({"system": ""}, {"template": "chat", "system": None, "prompt_key": "q"}),
        ({"system": "Think."}, {"template": "chat", "system": "Think."}),
        ({"template": "plain"}, {"template": "plain", "system": None, "max_prompt_tokens": 77}),
        ({"prompt_key": "prompt", "max_prompt_tokens": 9}, {"prompt_key": "prompt", "max_prompt_tokens": 9}),
    ],
)
def test_evaluation_rows_become_prompts_as_in_training_by_default(given, expected):
    sets = {"held": {"data": {"path": "e.jsonl"} | given}}
    data = TRAINING | {"shuffle": False, "split": "test"}
    config = validate_config({"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}, "data": data, "eval": sets})
    held = config.eval["held"].data
    assert {key: getattr(held, key) for key in expected} == expected
    assert (held.shuffle, held.split) == (True, "train"), "the source of the rows is the set's own"
    assert config_from_json(config_to_json(config)) == config, "a resolved configuration stays as it is"


def test_a_problem_of_a_key_that_evaluations_inherit_is_reported_once():
    tree = {"data": {"path": "t.jsonl", "template": "char"}, "eval": {"held": {"data": {"path": "e.jsonl"}}}}
    with pytest.raises(ConfigError) as caught:
        validate_config(tree | {"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}})
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith("data.template: ")


def test_paths_are_expanded_everywhere_and_once(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOT_SET", raising=False)
    given = {
        "model.path": "~/m",
        "run.dir": "$SCRATCH/runs",
        "checkpoint.dir": "~/c",
        "data.path": "${SCRATCH}/t.jsonl",
        "eval.held.data.path": "~/e.jsonl",
        "learner.kl.path": "~/r",
        "learner.teacher": "~/t",
        "sft.data": "~/s.jsonl",
    }
    home = str(tmp_path)
    expanded = {key: path.replace("~", home).replace("${SCRATCH}", "/scratch/me") for key, path in given.items()}
    expanded["run.dir"] = "/scratch/me/runs"
    config = load_config([], given | {"sft.weight": "0.1"})
    assert config.eval["held"].data.path == expanded.pop("eval.held.data.path")
    assert {key: attrgetter(key)(config) for key in expanded} == expanded
    assert config_from_json(config_to_json(config)) == config
    for path in ("$NOT_SET/x", "http://host:1/~me/v1"):
        kept = load_config([], given | {"sft.weight": "0.1", "learner.teacher": path})
        assert kept.learner.teacher == path
        # Another host may set a variable that the launcher's host does not.
        monkeypatch.setenv("NOT_SET", "/elsewhere")
        assert config_from_json(config_to_json(kept)) == kept
        monkeypatch.delenv("NOT_SET")


def test_each_name_of_another_framework_is_listed_once_with_a_key_or_a_reason():
    known = {key for key, *_ in known_keys()}
    assert len(set(NAMES)) == len(NAMES) > 300
    for name in NAMES:
        meaning = meaning_of(name)
        assert set(meaning.keys) <= known, name
        assert meaning.keys or meaning.note, name


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"learner": {"learning_rate": 1.0}}, "learner.learning_rate: unknown key; asyncrl has learner.lr for it"),
        (
            {"rollout": {"Max-New-Tokens": 5}},
            "rollout.Max-New-Tokens: unknown key; asyncrl has rollout.max_tokens for it",
        ),
        ({"learner": {"beta": 0.1}}, "learner.beta: unknown key; asyncrl has learner.kl.coefficient for it"),
        ({"seed": 3}, "seed: unknown key; asyncrl has run.seed for it"),
        (
            {"model": {"name": "m"}},
            "model.name: unknown key; asyncrl has model.path for it (a folder, or ORG/NAME of the hub",
        ),
        ({"lora": {"r": 8}}, "lora.r: unknown key; asyncrl has lora.rank for it"),
        (
            {"eval": {"held": {"data": {"source": "synthetic"}, "num_generations": 2}}},
            "eval.held.num_generations: unknown key; asyncrl has eval.held.n for it",
        ),
        (
            {"rollout": {"typical_p": 0.9}},
            "rollout.typical_p: unknown key; asyncrl has no such setting: the learner scores",
        ),
        (
            {"trainer": {"epochs": 3, "nested": {"wandb_project": "p"}, "foo": 1, "max_tokens": 4}},
            "trainer: unknown key; trainer.epochs: asyncrl has learner.steps for it (it counts optimizer steps; an "
            "epoch has as many as the prompts divided by learner.groups_per_step); trainer.nested.wandb_project: "
            "asyncrl has sinks.wandb.project for it; trainer.max_tokens: asyncrl has rollout.max_tokens and eval.NAME.",
        ),
        # If no other framework has the name, the spelling decides.
        ({"evl": {"held": {"n": 3}}}, "evl: unknown key; did you mean eval?"),
        ({"rollout": {"max_token": 5}}, "rollout.max_token: unknown key; did you mean max_tokens?"),
        (
            {"eval": {"held": {"data": {"source": "synthetic"}, "path": "p.jsonl"}}},
            "eval.held.path: unknown key; did you mean eval.held.data.path?",
        ),
        ({"learner": {"foo": 5}}, "learner.foo: unknown key"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(tree, expected):
    """Nothing is dropped silently: each unknown key is an error."""
    laid = {name: SIMULATED.get(name, {}) | each if isinstance(each, dict) else each for name, each in tree.items()}
    (found,) = problems(SIMULATED | laid)
    assert found == expected if expected.endswith("foo: unknown key") else found.startswith(expected)


def test_sources_of_a_mixture_inherit_what_does_not_say_where_rows_come_from():
    sources = [ROWS | {"weight": 3.0, "template": "plain"}, OTHERS | {"max_prompt_tokens": 7}]
    keys = {"template": "chat", "system": "s", "shuffle": False, "source": sources}
    config = validate_config(SIMULATED | {"data": keys})
    first, second = config.data.mixture
    assert (first.weight, first.template, first.system, first.shuffle) == (3.0, "plain", None, False)
    assert (second.weight, second.template, second.system, second.path) == (1.0, "chat", "s", None)
    assert list(config.training_sets) == ["data.source.rows", "data.source.others"]
    assert config.longest_prompt == 1024
    assert config_from_json(config_to_json(config)) == config
    assert config.prompts_of("train", "others") == second and config.prompts_of("train", "gone") == config.data
    assert validate_config(SIMULATED).training_sets.keys() == {"data"}
    assert frozenset(REWARD_JUDGES) == JUDGES

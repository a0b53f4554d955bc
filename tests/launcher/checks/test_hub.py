"""Names of the hub: the choice of files, and pins and downloads by the real huggingface_hub from a local server."""

import asyncio
import io
import os
from contextlib import contextmanager

import msgspec
import pytest
from hub_server import TOKEN, HubServer

from asyncrl.config.hub import HubName, with_pins
from asyncrl.config.load import validate_config
from asyncrl.core.errors import DataError
from asyncrl.launcher.checks.findings import Fetched, FetchOrder, Pin, errors_of
from asyncrl.launcher.checks.hub import cached, data_files, fetch, for_actors, missing_bytes, model_files, name_of, pin
from asyncrl.launcher.host_part import fetch_order
from asyncrl.launcher.hosts.contact import ReachedHosts
from asyncrl.launcher.hosts.start import LocalStart
from asyncrl.launcher.terminal.progress import TerminalProgress

MODEL = {
    "config.json": "{}",
    "tokenizer.json": "{}",
    "model.safetensors": "weights",
    "pytorch_model.bin": "other weights",
    "original/consolidated.safetensors": "other weights",
    "model-Q4.gguf": "other weights",
    "consolidated.safetensors": "a copy",
}
ROWS = {
    "README.md": "",
    "main/train-0.jsonl": '{"prompt": "a"}\n',
    "main/train-1.jsonl": '{"prompt": "b"}\n',
    "main/test-0.jsonl": '{"prompt": "c"}\n',
}


@pytest.fixture
def hub():
    with HubServer().running() as server:
        yield server


@pytest.fixture
def here(tmp_path, monkeypatch, hub):
    """A folder without paths that look like names, and the variables of this hub."""
    monkeypatch.chdir(tmp_path)
    for key, value in hub.environment(tmp_path / "cache").items():
        monkeypatch.setenv(key, value)
    return tmp_path


def configured(**tables):
    base = {"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}, "data": {"source": "synthetic"}}
    return validate_config(base | tables)


def pinned(**tables):
    return asyncio.run(pin(configured(**tables)))


def fetched(pins):
    return errors_of(asyncio.run(fetch(FetchOrder(pins=pins, limit_s=60.0))).findings)


def problems(**tables):
    return errors_of(pinned(**tables).findings)


# --- the choice of files ---


def test_a_model_comes_without_weights_that_nothing_loads():
    files = {name: len(text) for name, text in MODEL.items()}
    assert list(model_files(HubName("a/b"), files)) == ["config.json", "tokenizer.json", "model.safetensors"]
    older = {"config.json": 1, "pytorch_model.bin": 2, "x/model.safetensors": 3, "tf_model.h5": 4}
    assert list(model_files(HubName("a/b"), older)) == ["config.json", "pytorch_model.bin"]
    with pytest.raises(DataError, match=r"a/b: has no weights in safetensors or pytorch_model\.bin"):
        model_files(HubName("a/b"), {"config.json": 1, "model.gguf": 2})


@pytest.mark.parametrize(
    ("path", "split", "expected"),
    [
        ("main", "train", ["main/train-0.jsonl", "main/train-1.jsonl"]),
        ("main", "test", ["main/test-0.jsonl"]),
        ("", "train", ["main/train-0.jsonl", "main/train-1.jsonl"]),
        ("main/test-0.jsonl", "train", ["main/test-0.jsonl"]),
        ("main/*-0.jsonl", "train", ["main/test-0.jsonl", "main/train-0.jsonl"]),
    ],
)
def test_files_of_a_data_set(path, split, expected):
    assert data_files(HubName("a/b", path=path, is_data=True), dict.fromkeys(ROWS, 1), None, split) == expected


@pytest.mark.parametrize(
    ("files", "path", "problem"),
    [
        (ROWS, "main/none.jsonl", "a/b/main/none.jsonl: has no such file; it has README.md, main/test-0.jsonl, main/"),
        (ROWS, "*.jsonl", "has no such file"),
        (
            {"x/train.jsonl": "", "y/train.jsonl": ""},
            "",
            "holds several data sets: x, y. To do: give one of them, as a/b/x",
        ),
        ({"README.md": ""}, "", "without a file of rows"),
    ],
)
def test_an_ambiguous_or_missing_file_lists_the_files(files, path, problem):
    with pytest.raises(DataError) as failed:
        data_files(HubName("a/b", path=path, is_data=True), dict.fromkeys(files, 1), None, "train")
    assert problem in str(failed.value)


# --- pins and downloads ---


def test_a_model_is_pinned_and_downloaded(here, hub):
    commit = hub.put("models", "org/model", MODEL)
    found = pinned(model={"path": "org/model"})
    assert found.findings == [] and found.by_key() == {"model.path": f"org/model@{commit}"}
    (only,) = found.pins
    assert missing_bytes(only) == sum(only.files.values()) == 4 + len("weights")
    assert fetched(found.pins) == []
    folder = name_of(only).folder
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert missing_bytes(only) == 0
    hub.requests.clear()
    assert fetched(found.pins) == [] and hub.requests == []


def test_data_is_pinned_to_one_commit_and_only_its_files_are_downloaded(here, hub):
    commit = hub.put("datasets", "org/rows", ROWS)
    test = {"heldout": {"data": {"path": "org/rows/main/test-0.jsonl"}}}
    found = pinned(data={"path": "org/rows/main"}, eval=test)
    assert found.by_key() == {
        "data.path": f"org/rows@{commit}/main",
        "eval.heldout.data.path": f"org/rows@{commit}/main/test-0.jsonl",
    }
    assert fetched(found.pins[:1]) == []
    folder = name_of(found.pins[0]).folder
    assert sorted(file.name for file in folder.rglob("*.jsonl")) == ["train-0.jsonl", "train-1.jsonl"]
    assert sum(request.endswith("/revision/main") for request in hub.requests) == 1


def test_conversations_need_one_file(here, hub):
    commit = hub.put("datasets", "org/talk", {"a.jsonl": "{}"})
    config = configured(
        sft={"data": "org/talk", "warm_steps": 1},
        model={"path": "/m"},
        learner={},
        rollout={"engine": "reference", "concurrency": 8},
    )
    found = asyncio.run(pin(config))
    assert found.by_key() == {"sft.data": f"org/talk@{commit}/a.jsonl"}
    hub.put("datasets", "org/talk", {"b.jsonl": "{}"})
    (problem,) = errors_of(asyncio.run(pin(config)).findings)
    assert problem == "sft.data: org/talk: has several files: a.jsonl, b.jsonl; fix: name one in sft.data"


def test_a_kept_pin_stays_at_its_commit_when_the_branch_has_moved(here, hub):
    old = hub.put("models", "org/model", MODEL)
    pins = pinned(model={"path": "org/model"}).by_key()
    new = hub.put("models", "org/model", {"config.json": '{"new": 1}'})
    assert asyncio.run(pin(with_pins(configured(model={"path": "org/model"}), pins))).by_key() == pins
    assert old in pins["model.path"]
    assert pinned(model={"path": "org/model"}).by_key() == {"model.path": f"org/model@{new}"}
    assert pinned(model={"path": f"org/model@{old}"}).by_key() == pins


def test_a_warm_cache_is_enough_offline(here, hub, monkeypatch):
    commit = hub.put("models", "org/model", MODEL)
    hub.put("datasets", "org/rows", ROWS)
    keys = {"model": {"path": "org/model"}, "data": {"path": "org/rows/main"}}
    assert fetched(pinned(**keys).pins) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    found = pinned(**keys)
    assert found.findings == [] and fetched(found.pins) == [] and hub.requests == []
    assert found.by_key()["model.path"] == f"org/model@{commit}"
    (problem,) = problems(model={"path": "org/other"})
    assert "HF_HUB_OFFLINE is set, and the cache does not have it" in problem
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pinned(**keys).by_key() == found.by_key()


@contextmanager
def variables(**values):
    before = dict(os.environ)
    os.environ.update(values)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_failures_name_the_key_and_the_way_to_use_a_folder(here, hub):
    hub.put("models", "org/model", MODEL)
    hub.put("models", "org/gated", MODEL)
    hub.gate("models", "org/gated")
    where = "where the hub can be reached and set model.path to the folder"
    (absent,) = problems(model={"path": "org/none"})
    assert absent == (
        "model.path: org/none is no folder here, and as a name of the Hugging Face hub: 127.0.0.1 has no such model, "
        "or it is private and HF_TOKEN gives no access; fix: to use a folder, run "
        f"`hf download org/none --local-dir none` {where}"
    )
    (revision,) = problems(model={"path": "org/model@v9"})
    assert "127.0.0.1 has no revision v9 of it" in revision and "--revision v9" in revision
    with variables(HF_ENDPOINT="http://127.0.0.1:9"):
        (away,) = problems(model={"path": "org/model"})
        assert "127.0.0.1 cannot be reached (ConnectError), and the cache does not have it" in away
    gated = pinned(model={"path": "org/gated"})
    assert gated.findings == []
    (refused,) = fetched(gated.pins)
    assert "is gated: ask for access on its page at 127.0.0.1, and set HF_TOKEN to a token of yours" in refused
    with variables(HF_TOKEN=TOKEN):
        assert fetched(gated.pins) == []
    assert TOKEN in hub.tokens


def test_a_folder_of_a_host_is_no_name_of_the_hub(here, hub):
    hub.put("models", "org/model", MODEL)
    pins = pinned(model={"path": "org/model"}).pins
    (here / "org" / "model").mkdir(parents=True)
    assert pinned(model={"path": "org/model"}).pins == []
    (problem,) = fetched(pins)
    assert problem.startswith("model.path: org/model is a folder here, and a name of the hub for the launcher; fix: ")


def test_hosts_download_to_their_own_caches(here, hub, monkeypatch):
    """Each host's entry point gets the order with the launcher's variables, the token among them."""
    hub.put("models", "org/model", MODEL)
    hub.gate("models", "org/model")
    pins = pinned(model={"path": "org/model"}).pins

    def order(name, token):
        monkeypatch.setenv("HF_TOKEN", token)
        config = configured()
        made = fetch_order(config, pins)
        return msgspec.structs.replace(made, env=made.env | {"HF_HOME": str(here / name)})

    async def asked():
        reached = ReachedHosts(LocalStart(), 60.0, TerminalProgress(io.StringIO(), 1), count=2)
        try:
            await reached.reach(["a", "b"])
            orders = {"a": order("a", TOKEN), "b": order("b", "hf_wrong")}
            return await reached.ask(orders, Fetched, "downloaded", 60.0, "hub.timeout_s")
        finally:
            await reached.close()

    answers = asyncio.run(asked())
    assert answers["a"].findings == [] and "is gated" in answers["b"].findings[0].text
    folder = here / "a" / "hub" / "models--org--model"
    assert (folder / "snapshots" / pins[0].name.partition("@")[2] / "model.safetensors").read_text() == "weights"
    assert missing_bytes(pins[0]) == sum(pins[0].files.values())


def test_each_host_gets_the_files_that_its_actors_read():
    keys = ("model.path", "learner.teacher", "sft.data", "data.path", "eval.a.data.path")
    pins = [Pin(key=key, asked="o/n", revision="main", name="o/n@" + "a" * 40, files={}) for key in keys]

    def read(*actors):
        return [pin.key for pin in for_actors(pins, actors)]

    assert read("rollouter/0", "episodes/0") == ["model.path"]
    assert read("learner/1") == ["model.path", "learner.teacher", "sft.data"]
    assert read("controller/0", "dataloader/0") == ["model.path", "data.path", "eval.a.data.path"]
    assert read("reward/0", "sinks/0") == []


def test_a_file_that_is_missing_in_the_cache_counts(here):
    name = HubName("org/model", "a" * 40)
    name.folder.mkdir(parents=True)
    (name.folder / "config.json").write_text("{}")
    one = Pin(key="model.path", asked="org/model", revision="main", name=str(name), files={"config.json": 2, "x": 5})
    assert missing_bytes(one) == 5
    assert cached(name) == ("a" * 40, {"config.json": 2}) and cached(HubName("org/model")) is None

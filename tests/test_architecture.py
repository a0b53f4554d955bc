"""The import directions of docs/architecture.md, held against the code as it stands."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "asyncrl"
CONTRACT = {
    "errors",
    "roles",
    "disk",
    "files",
    "config",
    "messages",
    "snapshot",
    "tokenizer",
    "stops",
    "ledger",
    "group_file",
    "gathering",
    "trajectories",
    "chat",
    "outcome",
    "jsonl",
    "order",
    "sft",
    "teacher",
    "lora",
}
ACTORS = {"dataloader", "rollouter", "reward", "learner", "parameter_server", "controller", "episodes", "sinks"}
FOR_ACTORS = CONTRACT | {"wire", "runtime", "monitor", "weights", "checkpoint"}

MAY_IMPORT = {
    "errors": set(),
    "roles": set(),
    "gathering": {"errors"},
    "disk": set(),
    "files": set(),
    "config": {"errors", "roles"},
    "snapshot": set(),
    "messages": {"roles", "snapshot"},
    "tokenizer": {"errors", "config"},
    "stops": {"errors", "config", "tokenizer"},
    "chat": {"errors", "config", "messages", "tokenizer"},
    "jsonl": {"errors"},
    "order": set(),
    "sft": {"errors", "config", "chat", "tokenizer", "stops", "jsonl", "order"},
    "teacher": {"config"},
    "lora": {"config"},
    "ledger": {"messages"},
    "trajectories": {"messages"},
    "outcome": set(),
    "group_file": {"errors", "messages"},
    "checkpoint": {"errors", "disk", "files", "config", "messages", "group_file"},
    "wire": {"errors", "messages"},
    "weights": {"errors", "messages"},
    "monitor": {"errors", "files", "messages", "snapshot"},
    "runtime": {"errors", "roles", "config", "messages", "snapshot", "wire", "monitor"},
    # It reads the user's data and calls the user's reward function, and finds their episodes, as those actors do.
    "preflight": FOR_ACTORS | {"dataloader", "reward", "episodes"},
    "launcher": FOR_ACTORS | {"preflight"},
    # It plays an episode with the parts that play it in a run.
    "doctor": FOR_ACTORS | {"preflight", "launcher", "rollouter", "episodes"},
    "cli": FOR_ACTORS | {"preflight", "launcher", "doctor"} | ACTORS,
    **{actor: FOR_ACTORS | {actor} for actor in ACTORS},
}
ROOMS_OF_LEARNER = {
    "algorithm": set(),
    "fsdp": {"algorithm"},
    "groups": {"algorithm"},
    "metrics": {"groups"},
    "publishing": set(),
    "checkpoint": {"fsdp"},
}
# What looks at a run from outside, beside what actors use of the same folder.
OUTSIDE = {"top/source/client.py": {"config", "runtime", "wire"}}
HEAVY = {
    "vllm": ("rollouter/engines/vllm/",),
    "torch": ("learner/", "rollouter/engines/vllm/", "rollouter/engines/reference", "weights/collective/"),
    "transformers": ("learner/", "rollouter/engines/vllm/", "rollouter/engines/reference", "tokenizer.py"),
}


def imports(tree):
    """(module, whether at the top level) of every import."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import hides which part it is of.
            yield "." * node.level + (node.module or ""), id(node) in top


@pytest.fixture(scope="module")
def modules():
    """(place, tree) of every module."""
    found = [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py"))]
    assert found
    return found


def test_imports_go_one_way(modules):
    wrong = []
    for place, tree in modules:
        part = place.partition("/")[0].removesuffix(".py")
        if part not in MAY_IMPORT and part != "__init__":
            wrong.append(f"{place} belongs to no part that is known here")
            continue
        allowed = MAY_IMPORT.get(part, set()) | {part} | OUTSIDE.get(place, set())
        for module, top in imports(tree):
            ours = module.startswith("asyncrl.")
            # The package itself loads what scripts ask of it, and only then.
            if part == "__init__":
                wrong += [f"{place} imports {module}"] * (top and module != "typing")
            elif module.startswith(".") or (ours and module.split(".")[1] not in allowed):
                wrong.append(f"{place} imports {module}")
    assert not wrong


def test_rooms_of_the_learner_know_each_other_one_way(modules):
    wrong = []
    for place, tree in modules:
        room = Path(place).parent.name
        if not place.startswith("learner/") or room == "learner":
            continue
        for module, _ in imports(tree):
            other = module.removeprefix("asyncrl.learner.").partition(".")[0]
            if module.startswith("asyncrl.learner.") and other in ROOMS_OF_LEARNER.keys() - ROOMS_OF_LEARNER[room] - {
                room
            }:
                wrong.append(f"{place} imports {module}")
    assert not wrong


def test_heavy_libraries_stay_in_their_folders(modules):
    wrong = []
    for place, tree in modules:
        for module, top in imports(tree):
            library = module.split(".")[0]
            if library in HEAVY and not place.startswith(HEAVY[library]):
                late_in_codec = library == "torch" and place == "wire/codec.py" and not top
                if not late_in_codec:
                    wrong.append(f"{place} imports {module}")
    assert not wrong


def test_nothing_that_is_received_can_be_unpickled(modules):
    wrong = []
    for place, tree in modules:
        for module, _ in imports(tree):
            if module.split(".")[0] in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}:
                wrong.append(f"{place} imports {module}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                forbidden = {"broadcast_object_list", "all_gather_object", "scatter_object_list", "recv_pyobj"}
                if node.attr in forbidden:
                    wrong.append(f"{place}:{node.lineno} calls {node.attr}")
    assert not wrong

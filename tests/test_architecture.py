"""The import directions of docs/architecture.md, held against the code as it stands."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "asyncrl"
CONTRACT = {"errors", "disk", "config", "messages", "snapshot", "tokenizer", "stops", "ledger", "group_file"}
ACTORS = {"dataloader", "rollouter", "reward", "learner", "parameter_server", "controller"}
FOR_ACTORS = CONTRACT | {"wire", "runtime", "monitor", "weights", "checkpoint"}

MAY_IMPORT = {
    "errors": set(),
    "disk": set(),
    "config": {"errors"},
    "snapshot": set(),
    "messages": {"snapshot"},
    "tokenizer": {"errors"},
    "stops": {"errors", "config", "tokenizer"},
    "ledger": {"messages"},
    "group_file": {"errors", "messages"},
    "checkpoint": {"errors", "disk", "config", "messages", "group_file"},
    "wire": {"errors", "messages"},
    "weights": {"errors", "messages"},
    "monitor": {"errors", "messages", "snapshot"},
    "runtime": {"errors", "config", "messages", "snapshot", "wire", "monitor"},
    # It reads the user's data and calls the user's reward function as those actors do.
    "preflight": FOR_ACTORS | {"dataloader", "reward"},
    "launcher": FOR_ACTORS | {"preflight"},
    "doctor": FOR_ACTORS | {"preflight", "launcher"},
    "cli": FOR_ACTORS | {"preflight", "launcher", "doctor"} | ACTORS,
    **{actor: FOR_ACTORS | {actor} for actor in ACTORS},
}
# What looks at a run from outside, beside what actors use of the same folder.
OUTSIDE = {"monitor/client.py": {"config", "runtime", "wire"}}
HEAVY = {
    "vllm": ("rollouter/engines/vllm/",),
    "torch": ("learner/", "rollouter/engines/vllm/", "rollouter/engines/reference", "weights/collective/"),
    "transformers": ("learner/", "rollouter/engines/vllm/", "rollouter/engines/reference", "tokenizer.py"),
}
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path):
    """(module, whether at the top level) of every import."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module, id(node) in top


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = part_of(path)
    if part == "__init__":
        assert not list(imports(path))
        return
    allowed = MAY_IMPORT[part] | {part} | OUTSIDE.get(str(path.relative_to(ROOT)), set())
    for module, _ in imports(path):
        if module.startswith("asyncrl."):
            assert module.split(".")[1] in allowed, f"{part} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_stay_in_their_folders(path):
    place = str(path.relative_to(ROOT))
    for module, top in imports(path):
        for library, homes in HEAVY.items():
            if module.split(".")[0] == library and not (library == "torch" and place == "wire/codec.py" and not top):
                assert place.startswith(homes), f"{place} imports {library}"


def test_nothing_that_is_received_can_be_unpickled():
    for path in MODULES:
        for module, _ in imports(path):
            assert module.split(".")[0] not in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                forbidden = {"broadcast_object_list", "all_gather_object", "scatter_object_list", "recv_pyobj"}
                assert node.attr not in forbidden, f"{path}:{node.lineno}"

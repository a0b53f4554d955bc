"""The import directions of docs/architecture.md, compared with the code."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "asyncrl"
TESTS = Path(__file__).parent
MOST_IN_A_FOLDER = 15
CONTRACT = {"errors", "disk", "config", "messages", "snapshot", "tokenizer", "stops", "ledger", "group_file", "roles"}
CONTRACT |= {"other_names", "gathering", "trajectories", "chat", "outcome", "data", "sft", "teacher", "lora", "files"}
ACTORS = {"dataloader", "rollouter", "reward", "learner", "parameter_server", "controller", "episodes", "sinks"}
FOR_ACTORS = CONTRACT | {"wire", "runtime", "workers", "telemetry", "text", "weights", "checkpoint"}
VIEWERS = {"top", "report", "explain"}

MAY_IMPORT = {
    "errors": set(),
    "disk": set(),
    "files": set(),
    "snapshot": set(),
    "outcome": set(),
    "text": {"errors"},
    "roles": set(),
    "gathering": {"errors"},
    "other_names": set(),
    "config": {"errors", "roles", "other_names"},
    "messages": {"snapshot", "roles"},
    "tokenizer": {"errors", "config"},
    "stops": {"errors", "config", "tokenizer"},
    "chat": {"errors", "config", "messages", "tokenizer"},
    "data": {"errors"},
    "sft": {"errors", "config", "chat", "tokenizer", "stops", "data"},
    "teacher": {"config"},
    "lora": {"config"},
    "ledger": {"messages"},
    "trajectories": {"messages"},
    "group_file": {"errors", "messages"},
    "checkpoint": {"errors", "disk", "files", "config", "messages", "group_file"},
    "wire": {"errors"},
    "weights": {"errors", "messages"},
    "telemetry": {"messages", "snapshot", "files", "text", "roles"},
    "runtime": {"errors", "files", "config", "messages", "snapshot", "wire", "telemetry"},
    "workers": {"errors", "files", "config", "messages", "wire", "telemetry", "runtime"},
    "explain": {"errors", "telemetry", "text"},
    # It calls a controller from outside.
    "top": {"errors", "messages", "snapshot", "telemetry", "text", "runtime", "wire"},
    "report": {"errors", "snapshot", "files", "telemetry", "text", "top"},
    # It reads the user's data, calls the user's reward function and finds their episodes, as those actors do.
    "checks": FOR_ACTORS | {"dataloader", "reward", "episodes"},
    "launcher": FOR_ACTORS | {"checks"},
    # It plays an episode with the same parts as a run.
    "doctor": FOR_ACTORS | {"checks", "launcher", "rollouter", "episodes"},
    "cli": FOR_ACTORS | {"checks", "launcher", "doctor"} | ACTORS | VIEWERS,
    **dict.fromkeys(ACTORS, FOR_ACTORS),
}
HEAVY = {
    "vllm": ("rollouter/engines/vllm/",),
    "torch": (
        "learner/",
        "rollouter/engines/vllm/",
        "rollouter/engines/reference",
        "weights/broadcast",
        "weights/tensors",
    ),
    "transformers": ("learner/", "rollouter/engines/vllm/", "rollouter/engines/reference", "tokenizer.py"),
}
UNPICKLING = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
UNPICKLED = {"broadcast_object_list", "all_gather_object", "scatter_object_list", "recv_pyobj"}


def imports(tree, names):
    """(module, whether at the top level) of every import."""
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import hides the imported part.
            module = "." * node.level + (node.module or "")
            for name in {f"{module}.{alias.name}" for alias in node.names} & names or {module}:
                yield name, id(node) in top


@pytest.fixture(scope="module")
def modules():
    """{place: (tree, imports)} of every module."""
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    assert trees
    names = {"asyncrl." + place.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for place in trees}
    return {place: (tree, list(imports(tree, names))) for place, tree in trees.items()}


def test_imports_go_one_way(modules):
    wrong = []
    for place, (tree, found) in modules.items():
        part = place.partition("/")[0].removesuffix(".py")
        for module, top in found:
            library, _, rest = module.partition(".")
            late_in_codec = library == "torch" and place == "wire/codec.py" and not top
            heavy = library in HEAVY and not place.startswith(HEAVY[library]) and not late_in_codec
            if part == "__init__":
                # The package itself imports its names on demand, for scripts.
                forbidden = top and module != "typing"
            elif library == "asyncrl":
                forbidden = rest.split(".")[0] not in MAY_IMPORT.get(part, set()) | {part}
            else:
                forbidden = module.startswith(".") or heavy or library in UNPICKLING
            wrong += [f"{place} imports {module}"] * forbidden
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in UNPICKLED:
                wrong.append(f"{place}:{node.lineno} calls {node.attr}, which unpickles")
    assert not wrong


def room(place):
    """The folder of a module. Modules of the package itself and the entry modules of rooms are rooms too."""
    path = Path(place)
    is_door = path.name == "__init__.py" and any((ROOT / path.parent).glob("*/__init__.py"))
    return place if is_door or len(path.parts) == 1 else str(path.parent)


def test_rooms_do_not_import_each_other_in_a_circle(modules):
    known = {}
    for place, (_, found) in modules.items():
        for module, _ in found:
            path = module.removeprefix("asyncrl.").replace(".", "/")
            for other in (f"{path}.py", f"{path}/__init__.py"):
                if module.startswith("asyncrl.") and other in modules and room(other) != room(place):
                    known.setdefault(room(place), set()).add(room(other))
    left = set(known)
    # A room outside every circle imports no other, or no other imports it.
    while ends := {one for one in left if not known[one] & left or not any(one in known[by] for by in left)}:
        left -= ends
    assert not {one: sorted(known[one] & left) for one in sorted(left)}


def test_no_folder_has_too_many_files(modules):
    here = [TESTS / path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    there = [ROOT / place for place in modules if not place.endswith("__init__.py")]
    beside = Counter(path.parent for path in here + there)
    without_rooms = {TESTS / "cluster"}
    assert not {str(at): n for at, n in beside.items() if n > MOST_IN_A_FOLDER and at not in without_rooms}


DIAGRAM = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("diagram", DIAGRAM.findall((ROOT.parent / "docs" / "architecture.md").read_text()))
def test_sequence_diagrams_are_in_step_with_the_imports(modules, diagram):
    """A participant is a module. An arrow is an import, in one direction, or a message that both modules import."""
    places = dict(re.findall(r"^ +participant (\w+) as (\S+)$", diagram, re.MULTILINE))
    arrows = re.findall(r"^ +(\w+)-?->>(\w+): (\w+)", diagram, re.MULTILINE)
    assert len(arrows) == diagram.count("->>") and set(places) == {end for arrow in arrows for end in arrow[:2]}
    wrong = []
    for sender, receiver, message in arrows:
        first, second = ({module for module, _ in modules[places[end]][1]} for end in (sender, receiver))
        names = ["asyncrl." + places[end].removesuffix(".py").replace("/", ".") for end in (receiver, sender)]
        imported = any(name.startswith(names[0]) for name in first) or any(name.startswith(names[1]) for name in second)
        trees = [ast.dump(modules[places[end]][0]) for end in (sender, receiver)]
        sent = all(f"alias(name='{message}')" in tree for tree in trees)
        wrong += [f"{places[sender]} -> {places[receiver]}: {message}"] * (not imported and not sent)
    assert not wrong

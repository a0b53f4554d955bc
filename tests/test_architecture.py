"""The import directions of docs/architecture.md, compared with the code."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "asyncrl"
TESTS = Path(__file__).parent
MOST_IN_A_FOLDER = 15
ACTORS = {"dataloader", "rollouter", "reward", "learner", "parameter_server", "controller", "episodes", "observe/sinks"}
FOR_ACTORS = {
    "core",
    "config",
    "messages",
    "data",
    "text",
    "checkpoint",
    "rpc",
    "rpc/wire",
    "workers",
    "observe",
    "gpu",
    "weights",
}
VIEWERS = {"top", "view", "observe/report", "observe/explain"}

MAY_IMPORT = {
    "core": set(),
    "config": {"core"},
    "messages": {"core"},
    "data": {"core"},
    "text": {"core", "config", "messages", "data"},
    "checkpoint": {"core", "config", "messages"},
    "weights": {"core", "config", "messages"},
    "rpc/wire": {"core"},
    "observe": {"core", "messages"},
    "rpc": {"core", "config", "messages", "observe", "rpc/wire"},
    "workers": {"core", "config", "messages", "observe", "rpc", "rpc/wire"},
    "sandbox": {"rpc", "workers"},
    "gpu": {"core", "config", "observe"},
    "observe/explain": {"core", "observe"},
    # It calls a controller from outside.
    "top": {"core", "messages", "observe", "rpc", "rpc/wire"},
    "observe/report": {"core", "messages", "observe"},
    "view": {"core", "observe"},
    # They read the user's data, call the user's reward function and find their episodes, as those actors do.
    "launcher/checks": FOR_ACTORS | {"dataloader", "reward", "episodes", "learner/groups/teacher"},
    "launcher": FOR_ACTORS | {"launcher/checks"},
    # It plays an episode with the same parts as a run.
    "launcher/doctor": FOR_ACTORS | {"launcher", "launcher/checks", "rollouter", "episodes"},
    "cli": FOR_ACTORS | {"launcher", "launcher/checks", "launcher/doctor"} | ACTORS | VIEWERS,
    "api": {"core", "config", "workers", "observe", "launcher", "cli"},
    **dict.fromkeys(ACTORS, FOR_ACTORS),
    "learner": FOR_ACTORS | {"learner/groups/teacher"},
    "learner/groups/teacher": {"core", "config"},
}
"""The imports that each part may have. A part is a folder or a module, without parts below it that have an entry."""
HEAVY = {
    "vllm": ("rollouter/engines/vllm/",),
    "torch": (
        "learner/",
        "rollouter/engines/vllm/",
        "rollouter/engines/reference",
        "weights/broadcast",
        "weights/routers",
        "weights/tensors",
    ),
    "transformers": ("learner/", "rollouter/engines/vllm/", "rollouter/engines/reference", "text/tokenizer.py"),
}
UNPICKLING = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
WRITES_PICKLES = "api/functions.py"
"""Pickles functions of a script into a module of the run folder, and reads none."""
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


def part_of(place):
    """The part that a module or a folder belongs to."""
    path = place.removesuffix(".py")
    known = (at for at in MAY_IMPORT if path == at or path.startswith(f"{at}/"))
    return max(known, key=len, default=path)


def test_imports_go_in_one_direction(modules):
    wrong = []
    for place, (tree, found) in modules.items():
        part = part_of(place)
        for module, top in found:
            library, _, rest = module.partition(".")
            heavy = library in HEAVY and not place.startswith(HEAVY[library])
            if place == "__init__.py":
                # The package itself imports its names on demand, for scripts.
                forbidden = top and module != "typing"
            elif library == "asyncrl":
                forbidden = part_of(rest.replace(".", "/")) not in MAY_IMPORT[part] | {part}
            else:
                forbidden = module.startswith(".") or heavy or (library in UNPICKLING and place != WRITES_PICKLES)
            wrong += [f"{place} imports {module}"] * forbidden
        unpickled = UNPICKLED | ({"load", "loads", "Unpickler"} if place == WRITES_PICKLES else set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in unpickled:
                wrong.append(f"{place}:{node.lineno} calls {node.attr}, which unpickles")
    assert not wrong


CPU_GUARD = re.compile(r"^(options\.on_cpu|on_cpu|current_platform\.is_cpu)\(\w*\)$")


def test_the_engine_imports_modules_for_cpus_on_cpus_alone(modules):
    """vLLM's build for CUDA lacks some of them, and others would change how an engine computes there."""
    wrong, found = [], 0
    for place, (tree, _) in modules.items():
        if not place.startswith("rollouter/engines/vllm/") or Path(place).name.startswith("cpu_"):
            continue
        guarded = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and CPU_GUARD.match(ast.unparse(node.test)):
                guarded |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                # A name that is imported from a module may be a module or a function, such as options.on_cpu.
                parts = ".".join(names if isinstance(node, ast.Import) else names[:1]).split(".")
                if any("cpu" in part.split("_") for part in parts):
                    found += 1
                    wrong += [f"{place}:{node.lineno}"] * (id(node) not in guarded)
    assert not wrong and found >= 3


def room(place):
    """The folder of a module. Modules of the package itself and the entry modules of rooms are rooms too."""
    path = Path(place)
    is_door = path.name == "__init__.py" and any((ROOT / path.parent).glob("*/__init__.py"))
    return place if is_door or len(path.parts) == 1 else str(path.parent)


def test_folders_do_not_import_each_other_in_a_circle(modules):
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

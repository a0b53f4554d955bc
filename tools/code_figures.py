"""Figures of the code itself: ``python -m tools.code_figures``.

Prints sizes, shares and counts of the package, its folders and its tests as a table in Markdown. The tool reads the
files that git tracks, and imports and runs nothing. Fails if git fails or a file is not Python.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
PACKAGE = "asyncrl"
LONG_FUNCTION = 100
"""Lines above which a function counts as long."""
FULL_ROOM = 15
"""Modules side by side above which a folder counts as full."""
SMALL_MODULE = 90
"""Lines below which a module with a single importer counts as a fragment."""
WH_OPENING = re.compile(r"(What|Whoever|Whatever|Whichever)\b")
OF_OPENING = re.compile(r"Of\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of Python. ``path`` is relative to the root of the repository."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text, str(self.path))

    @property
    def lines(self) -> int:
        """Number of its lines, empty ones included."""
        return self.text.count("\n")

    @property
    def name(self) -> str:
        """Its dotted name."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def comments(self) -> int:
        """Number of lines that hold nothing but a comment, or end with one."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})

    def functions(self) -> Iterator[Function]:
        """Functions and methods, nested ones included."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        """Classes, nested ones included."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def imports(self) -> set[str]:
        """Dotted names that it imports: modules, and members as MODULE.MEMBER."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found


def tracked(folder: str) -> list[Module]:
    """Files of Python below a folder that git tracks."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line.endswith(".py") and (ROOT / line).exists()]
    return [Module(path, (ROOT / path).read_text()) for path in paths]


def injected_callables(modules: Sequence[Module]) -> float:
    """Parameters annotated as a Callable, for each ``__init__``."""
    constructors = [function for module in modules for function in module.functions() if function.name == "__init__"]
    callables = sum(
        "Callable" in ast.unparse(argument.annotation)
        for function in constructors
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None
    )
    return callables / max(1, len(constructors))


def shared_class_names(modules: Sequence[Module]) -> list[str]:
    """Names that more than one class has."""
    names = Counter(klass.name for module in modules for klass in module.classes())
    return sorted(name for name, count in names.items() if count > 1)


def suffix_pairs(modules: Sequence[Module]) -> list[str]:
    """Files of one folder whose names differ by a plural's s alone."""
    paths = {module.path for module in modules}
    return sorted(str(path) for path in paths if path.with_name(f"{path.stem}s.py") in paths)


def full_rooms(modules: Sequence[Module]) -> list[str]:
    """Folders with more than FULL_ROOM modules side by side, ``__init__`` left out."""
    rooms = Counter(str(module.path.parent) for module in modules if module.path.name != "__init__.py")
    return sorted(f"{room} ({count})" for room, count in rooms.items() if count > FULL_ROOM)


def fragments(modules: Sequence[Module]) -> int:
    """Number of modules below SMALL_MODULE lines that exactly one other imports."""
    importers: defaultdict[str, int] = defaultdict(int)
    for module in modules:
        for name in module.imports():
            importers[name] += 1
    return sum(
        module.lines < SMALL_MODULE and importers[module.name] == 1 and module.path.name != "__init__.py"
        for module in modules
    )


def docstrings(modules: Sequence[Module]) -> list[str]:
    """Docstrings of modules, classes, functions and attributes."""
    expressions = [node.value for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.Expr)]
    constants = [value.value for value in expressions if isinstance(value, ast.Constant)]
    return [text.strip() for text in constants if isinstance(text, str)]


def private_accesses(modules: Sequence[Module]) -> int:
    """Number of accesses to ``_name`` of something that is not self or cls."""
    return sum(
        isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr) is not None
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for module in modules
        for node in ast.walk(module.tree)
    )


def sleeps(modules: Sequence[Module]) -> int:
    """Number of calls of a function named sleep."""
    return sum(
        isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "sleep"
        for module in modules
        for node in ast.walk(module.tree)
    )


def package_rows(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Rows about the package."""
    lengths = [module.lines for module in modules]
    functions = [function for module in modules for function in module.functions()]
    long = sum((function.end_lineno or 0) - function.lineno + 1 > LONG_FUNCTION for function in functions)
    documented = sum(ast.get_docstring(function) is not None for function in functions)
    texts = docstrings(modules)
    yield "files / kLOC", f"{len(modules)} / {sum(lengths) / 1000:.1f}"
    yield (
        "lines of a module, median / p90 / max",
        f"{median(lengths):.0f} / {quantiles(lengths, n=10)[-1]:.0f} / {max(lengths)}",
    )
    yield f"functions over {LONG_FUNCTION} lines", str(long)
    yield "lines with a comment", f"{100 * sum(module.comments for module in modules) / sum(lengths):.1f} %"
    yield "functions with a docstring", f"{100 * documented / len(functions):.0f} %"
    yield "callables injected per `__init__`", f"{injected_callables(modules):.2f}"
    yield "folders with more than 15 modules", ", ".join(full_rooms(modules)) or "none"
    yield "names of more than one class", ", ".join(shared_class_names(modules)) or "none"
    yield "files of a folder that differ by a plural", ", ".join(suffix_pairs(modules)) or "none"
    yield f"modules under {SMALL_MODULE} lines with one importer", str(fragments(modules))
    yield "docstrings that open with a wh-clause", str(sum(WH_OPENING.match(text) is not None for text in texts))
    yield "docstrings that open with Of", str(sum(OF_OPENING.match(text) is not None for text in texts))


def room_rows(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Rows for the rooms of the package: kLOC and files, the largest first."""
    rooms: defaultdict[str, list[Module]] = defaultdict(list)
    for module in modules:
        rooms[module.path.parts[1]].append(module)
    for room, members in sorted(rooms.items(), key=lambda item: -sum(module.lines for module in item[1])):
        if len(members) > 1:
            yield room, f"{sum(module.lines for module in members) / 1000:.1f}k / {len(members)}"


def test_rows(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Rows about the tests."""
    functions = [f for module in modules for f in module.functions() if f.name.startswith("test_")]
    yield (
        "tests: files / kLOC / functions",
        (f"{len(modules)} / {sum(module.lines for module in modules) / 1000:.1f} / {len(functions)}"),
    )
    yield "tests: accesses to private members", str(private_accesses(modules))
    yield "tests: calls of sleep", str(sleeps(modules))


def table(head: tuple[str, str], rows: Iterator[tuple[str, str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {left} | {right} |" for left, right in (head, ("---", "---"), *rows))


def main() -> int:
    """Print the figures. Returns the exit code."""
    package, tests = tracked(PACKAGE), tracked("tests")
    print(table(("the code", PACKAGE), iter([*package_rows(package), *test_rows(tests)])))
    print()
    print(table(("room", "lines / files"), room_rows(package)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Figures of the code itself: ``python -m tools.code_figures``.

Prints sizes and counts of the package, its folders and its tests as a table in Markdown. The tool reads the files that
git tracks, and imports and runs nothing. Fails if git fails or a file is not Python.
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
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).parents[1]
LONG_FUNCTION = 100
"""Lines above which a function counts as long."""
FULL_FOLDER = 15
"""Modules side by side above which a folder counts as full."""
SMALL_MODULE = 90
"""Lines below which a module with a single importer counts as a fragment."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file of Python. ``path`` is relative to the root of the repository."""

    path: Path
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, str(self.path))))

    @property
    def lines(self) -> int:
        """Number of its lines, empty ones included."""
        return self.text.count("\n")

    @property
    def name(self) -> str:
        return ".".join(part for part in self.path.with_suffix("").parts if part != "__init__")

    @property
    def comments(self) -> int:
        """Number of lines that hold nothing but a comment, or end with one."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})

    def imports(self) -> set[str]:
        """Dotted names that it imports: modules, and members as MODULE.MEMBER."""
        found = {alias.name for node in self.nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found


def tracked(folder: str) -> list[Module]:
    """Files of Python below a folder that git tracks."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [Path(line) for line in listed.splitlines() if line.endswith(".py") and (ROOT / line).exists()]
    return [Module(path, (ROOT / path).read_text()) for path in paths]


def every(kind: type[Node], modules: Sequence[Module]) -> list[Node]:
    """Nodes of a kind, nested ones included."""
    return [node for module in modules for node in module.nodes if isinstance(node, kind)]


def functions(modules: Sequence[Module]) -> list[Function]:
    return [*every(ast.FunctionDef, modules), *every(ast.AsyncFunctionDef, modules)]


def shared_class_names(modules: Sequence[Module]) -> list[str]:
    """Names that more than one class has."""
    names = Counter(node.name for node in every(ast.ClassDef, modules))
    return sorted(name for name, count in names.items() if count > 1)


def full_folders(modules: Sequence[Module]) -> list[str]:
    """Folders with more than FULL_FOLDER modules side by side, ``__init__`` left out."""
    folders = Counter(str(module.path.parent) for module in modules if module.path.name != "__init__.py")
    return sorted(f"{folder} ({count})" for folder, count in folders.items() if count > FULL_FOLDER)


def fragments(modules: Sequence[Module]) -> int:
    """Number of modules below SMALL_MODULE lines that exactly one other imports."""
    importers = Counter(name for module in modules for name in module.imports())
    return sum(
        module.lines < SMALL_MODULE and importers[module.name] == 1 and module.path.name != "__init__.py"
        for module in modules
    )


def private_accesses(modules: Sequence[Module]) -> int:
    """Number of accesses to ``_name`` of something that is not self or cls."""
    return sum(
        re.match(r"_[a-z]", node.attr) is not None
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in every(ast.Attribute, modules)
    )


def sleeps(modules: Sequence[Module]) -> int:
    return sum(ast.unparse(node.func).split(".")[-1] == "sleep" for node in every(ast.Call, modules))


def package_rows(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    lengths, defined = [module.lines for module in modules], functions(modules)
    long = sum((function.end_lineno or 0) - function.lineno + 1 > LONG_FUNCTION for function in defined)
    documented = sum(ast.get_docstring(function) is not None for function in defined)
    yield "files / kLOC", f"{len(modules)} / {sum(lengths) / 1000:.1f}"
    yield (
        "lines of a module, median / p90 / max",
        f"{median(lengths):.0f} / {quantiles(lengths, n=10)[-1]:.0f} / {max(lengths)}",
    )
    yield f"functions over {LONG_FUNCTION} lines", str(long)
    yield "lines with a comment", f"{100 * sum(module.comments for module in modules) / sum(lengths):.1f} %"
    yield "functions with a docstring", f"{100 * documented / len(defined):.0f} %"
    yield f"folders with more than {FULL_FOLDER} modules", ", ".join(full_folders(modules)) or "none"
    yield "names of more than one class", ", ".join(shared_class_names(modules)) or "none"
    yield f"modules under {SMALL_MODULE} lines with one importer", str(fragments(modules))


def folder_rows(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Rows for the folders of the package: kLOC and files, the largest first."""
    folders: defaultdict[str, list[int]] = defaultdict(list)
    for module in modules:
        folders[module.path.parts[1]].append(module.lines)
    for folder, lengths in sorted(folders.items(), key=lambda item: -sum(item[1])):
        if len(lengths) > 1:
            yield folder, f"{sum(lengths) / 1000:.1f}k / {len(lengths)}"


def test_rows(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    tests = sum(function.name.startswith("test_") for function in functions(modules))
    lines = sum(module.lines for module in modules)
    yield "tests: files / kLOC / functions", f"{len(modules)} / {lines / 1000:.1f} / {tests}"
    yield "tests: accesses to private members", str(private_accesses(modules))
    yield "tests: calls of sleep", str(sleeps(modules))


def table(head: tuple[str, str], rows: Iterator[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in (head, ("---", "---"), *rows))


def main() -> int:
    package, tests = tracked("asyncrl"), tracked("tests")
    print(table(("the code", "asyncrl"), iter([*package_rows(package), *test_rows(tests)])))
    print()
    print(table(("folder", "lines / files"), folder_rows(package)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

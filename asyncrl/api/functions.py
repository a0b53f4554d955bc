"""Makes a module of the functions of a script or a notebook, so that worker processes can import them.

A function that a module on the path defines is named MODULE:FUNCTION, as in a configuration. Any other (of a script, a
notebook cell, a closure, a lambda) is pickled by cloudpickle into the text of a module, which lies in the run folder.
Importing that module is loading code that the same user wrote there, as any module on the path is. Nothing is pickled
or unpickled between processes (I6 in docs/architecture.md), and this module only writes.

Fails with UsageError if a function uses an object that cannot be pickled, or without cloudpickle.
"""

from __future__ import annotations

import base64
import inspect
import io
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from asyncrl.core.errors import UsageError
from asyncrl.core.files import find_source
from asyncrl.workers.user_code import PLACES

MODULE = "asyncrl_functions"
_TEXT = '''"""The functions that asyncrl.train was given, pickled by cloudpickle."""

import base64

import cloudpickle

{places} = {where!r}
globals().update(cloudpickle.loads(base64.b64decode("{pickled}")))
'''


class Functions:
    """The functions of one call, and the module of those that no other module defines."""

    def __init__(self, others: Functions | None = None) -> None:
        """With ``others``, the module also has their functions."""
        self._functions: dict[str, Callable[..., Any]] = {} if others is None else dict(others._functions)

    def spec(self, given: Callable[..., Any] | str) -> str:
        """Return how the configuration names a function or a class; a text is a name already."""
        if isinstance(given, str):
            return given
        name = getattr(given, "__qualname__", "")
        module = getattr(given, "__module__", None) or "__main__"
        is_found = module != "__main__" and getattr(sys.modules.get(module), name, None) is given
        if is_found and find_source(module) is not None:
            return f"{module}:{name}"
        name = getattr(given, "__name__", "")
        name = name if name.isidentifier() else "function"
        while self._functions.setdefault(name, given) is not given:
            name += "_"
        return f"{MODULE}:{name}"

    def text(self) -> str:
        """Return the text of the module; empty if it has no function. Raises UsageError."""
        if not self._functions:
            return ""
        try:
            pickled = base64.b64encode(_pickle(self._functions)).decode()
        except ImportError:
            problem = "functions of a script need the package cloudpickle: pip install 'asyncrl[notebook]'"
            raise UsageError(problem) from None
        except Exception as error:
            names = ", ".join(self._functions)
            problem = f"{names}: uses an object that cannot be passed to another process ({error}); make it inside"
            raise UsageError(problem) from error
        where = {name: place for name, given in self._functions.items() if (place := _place(given))}
        return _TEXT.format(places=PLACES, where=where, pickled=pickled)


def _pickle(functions: dict[str, Callable[..., Any]]) -> bytes:
    """Pickle functions with cloudpickle, and keep the names of their files."""
    import cloudpickle

    by_default = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        # cloudpickle drops the file's name, which errors must show.
        make, values, *rest = by_default(code)
        known = ("<dynamic-code>", code.co_filename)
        named = (_file(code) if type(each) is str and each in known else each for each in values)
        return (make, tuple(named), *rest)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: reduce_code})

    output = io.BytesIO()
    Pickler(output).dump(functions)
    return output.getvalue()


def _place(given: Callable[..., Any]) -> str:
    """FILE:LINE of a function; empty for a class or a callable object."""
    code = getattr(inspect.unwrap(given), "__code__", None)
    return f"{_file(code)}:{code.co_firstlineno}" if code is not None else ""


def _file(code: CodeType) -> str:
    """The file of a function's code; for a cell of a notebook its name there: Cell In[3]."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(code.co_filename) if shell is not None else None
    return " ".join(cell) if cell else code.co_filename

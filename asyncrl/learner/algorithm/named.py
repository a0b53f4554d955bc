"""The functions that ``learner.loss`` and ``learner.advantage`` name: one of ours by its name, one of the user's by
MODULE:FUNCTION. Ours are found in the same way, so that a new one is a function in its module and nothing else.

Fails with ConfigError naming the key when there is no such function, or it does not take its options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.runtime.workers.user_code import Keys, NotCallable, accepted, did_you_mean, load


def find_function(key: str, spec: str, module: str, given: str, options: Mapping[str, Any]) -> partial[Any]:
    """The function that ``spec``, the value of ``key``, names, with ``options`` (the value of KEY_options) filled in.

    ``module`` holds those of ours; ``given`` is the keyword that the function is called with. Raises ConfigError.
    """
    ours: Mapping[str, Callable[..., Any]] = importlib.import_module(module).BUILT_IN
    try:
        if ":" in spec:
            function = load(spec, key)
        elif spec in ours:
            function = ours[spec]
        else:
            near = did_you_mean(spec, list(ours))
            known = f"built in are {', '.join(ours)}, and MODULE:FUNCTION names one of your own"
            raise ConfigError([f"{key}: there is no built-in {key.rpartition('.')[2]} {spec!r}{near}; {known}"])
        if given not in accepted(spec, function, [given], dict(options), Keys(key, f"{key}_options")):
            raise ConfigError([f"{key}: {spec} does not take {given!r}, which is what it is called with"])
    except NotCallable as error:
        raise ConfigError(error.problems) from error
    return partial(function, **options)

"""Scenarios as tests: coroutines that receive what a runner has set up, and name fixtures in addition."""

import functools
import inspect


def played(run, given=1):
    """Turn ``run(tmp_path, scenario, *how)`` into a decorator, which passes on the first ``given`` parameters."""

    def on(*how, **more):
        def decorate(scenario):
            fixtures = list(inspect.signature(scenario).parameters)[given:]

            @functools.wraps(scenario)
            def test(tmp_path, **found):
                if "tmp_path" in fixtures:
                    found["tmp_path"] = tmp_path
                run(tmp_path, lambda *handed: scenario(*handed, **found), *how, **more)

            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            names = dict.fromkeys(["tmp_path", *fixtures])
            test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
            return test

        return decorate

    return on

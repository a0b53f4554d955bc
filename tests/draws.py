"""The number of examples that a property test draws.

``make test`` draws the same examples each time, so that a change is judged by its own faults. ``make test-slow`` sets
``ASYNCRL_TEST_DRAWS`` and draws others: that many times as many, from a seed that pytest prints.
"""

import os

from hypothesis import HealthCheck, settings

DEFAULT = 100
"""Examples of a test without a number of its own."""
TIMES = int(os.environ.get("ASYNCRL_TEST_DRAWS", "0"))
"""0: the same examples each time."""


def examples(count: int) -> int:
    """The number of examples for a test that draws ``count`` in ``make test``."""
    return count * max(1, TIMES)


def load_profile() -> None:
    """Set how all property tests draw. No example has a deadline, because machines are slow at times."""
    settings.register_profile(
        "asyncrl",
        deadline=None,
        derandomize=not TIMES,
        max_examples=examples(DEFAULT),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("asyncrl")

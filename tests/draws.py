"""The number of examples that a property test draws.

``make test`` draws the same examples each time, so that a change is judged by its own faults. ``make quick`` draws a
share of them. ``make test-slow`` sets ``ASYNCRL_TEST_DRAWS`` and draws others: that many times as many, from a seed
that pytest prints.
"""

import os

from hypothesis import HealthCheck, settings

DEFAULT = 100
"""Examples of a test without a number of its own."""
TIMES = int(os.environ.get("ASYNCRL_TEST_DRAWS", "0"))
"""0: the same examples each time."""
QUICK_SHARE = 10
"""``make quick`` draws one of so many examples."""
_is_quick = False


def examples(count: int) -> int:
    """The number of examples for a test that draws ``count`` in ``make test``."""
    return max(1, count // QUICK_SHARE) if _is_quick else count * max(1, TIMES)


def load_profile(*, quick: bool) -> None:
    """Set how all property tests draw. No example has a deadline, because machines are slow at times."""
    global _is_quick
    _is_quick = quick
    settings.register_profile(
        "asyncrl",
        deadline=None,
        derandomize=not TIMES,
        max_examples=examples(DEFAULT),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("asyncrl")

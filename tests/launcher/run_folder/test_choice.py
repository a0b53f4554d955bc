"""Which of the runs of a name ``--resume auto`` goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import UsageError
from asyncrl.launcher.run_folder.choice import Candidate, choose


def run(number, began, written=None, **fields):
    name = "trial" if number == 1 else f"trial-{number}"
    return Candidate(path=Path("/runs", name), number=number, began=began, written=written, **fields)


TABLE = [
    # candidates, chosen, passed over
    # Two starts without a checkpoint hold names, the good run is the third.
    ([run(1, 0), run(2, 10), run(3, 20, 25)], "trial-3", []),
    # A later run without one.
    ([run(1, 0, 5), run(2, 10)], "trial", ["trial-2"]),
    ([run(1, 0, 5), run(2, 10, unbegun=True)], "trial", []),
    # Written last counts, not the number.
    ([run(1, 0, 15), run(2, 10, 12)], "trial", ["trial-2"]),
    ([run(1, 30, 5), run(2, 10, 12)], "trial-2", ["trial"]),
    ([run(1, 0, 5), run(2, 10, 5)], "trial-2", []),
    # None has a checkpoint.
    ([run(1, 0), run(2, 10)], "trial", []),
    ([run(1, 0, unbegun=True), run(2, 10)], "trial-2", []),
]


@pytest.mark.parametrize(("candidates", "chosen", "passed_over"), TABLE)
def test_the_one_whose_checkpoint_was_written_last(candidates, chosen, passed_over):
    choice = choose(candidates)
    assert choice.path.name == chosen
    assert [warning.split()[0] for warning in choice.warnings] == [f"/runs/{name}" for name in passed_over]
    assert bool(choice.why) == (len(candidates) > 1)
    for name, warning in zip(passed_over, choice.warnings, strict=True):
        assert f"--resume /runs/{name} goes on with it" in warning


def test_a_run_that_lives_is_refused_by_name():
    for others in ([run(1, 0, 5)], [run(1, 0)], []):
        said = "/runs/trial-2 is in use: .* or name another run of that name by --resume PATH"
        with pytest.raises(UsageError, match=said):
            choose([*others, run(2, 10, lives=True)])


TIMES = st.integers(0, 5)
RUNS = st.lists(st.tuples(TIMES, st.none() | TIMES, st.booleans()), min_size=1, max_size=6).map(
    lambda found: [
        # One that has a checkpoint has begun.
        run(number, began, written, unbegun=unbegun and written is None)
        for number, (began, written, unbegun) in enumerate(found, 1)
    ]
)


@given(RUNS)
def test_no_checkpoint_that_was_written_later_is_passed_over(candidates):
    choice = choose(candidates)
    (chosen,) = [candidate for candidate in candidates if candidate.path == choice.path]
    written = [candidate.written for candidate in candidates if candidate.written is not None]
    assert chosen.written == (max(written) if written else None)
    # Nothing begins anew in silence, and nothing that ran later is passed over in silence.
    told = {warning.split()[0] for warning in choice.warnings}
    for candidate in candidates:
        if written and not candidate.unbegun and candidate.began > chosen.began:
            assert str(candidate.path) in told
    if not written and not all(candidate.unbegun for candidate in candidates):
        assert not chosen.unbegun

"""What tests of whole simulated runs share."""

import contextlib
import os
import signal

import pytest
from launcher.sim_runs import Run


@pytest.fixture
def launch(tmp_path):
    """Starts runs in the test's folder, which end with the test at the latest."""
    runs = []

    def start(*flags, terminal=None):
        runs.append(Run(tmp_path, *flags, terminal=terminal))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.processes() if run.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()

"""A process reads facts about itself."""

import subprocess
import sys
import time

TICK_S = 0.02
SCRIPT = "import time; time.sleep(0.3); from asyncrl.rpc.linux import age_s; print(age_s())"


def test_a_process_knows_its_age():
    began = time.monotonic()
    reported = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert 0.3 - TICK_S <= float(reported) <= time.monotonic() - began + TICK_S

"""A stand-in for the driver's library: NVML for one GPU of 24 GiB, compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from asyncrl.observe.machine import NVML

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
TOTAL_BYTES, USED_BYTES = 24 << 30, 1 << 30
SOURCE = f"""
int nvmlInit_v2(void) {{ return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {{ *handle = (void *)1; return index ? 2 : 0; }}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {{
    memory[0] = {TOTAL_BYTES}ULL;
    memory[1] = {TOTAL_BYTES - USED_BYTES}ULL;
    memory[2] = {USED_BYTES}ULL;
    return 0;
}}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *used) {{ used[0] = 50; used[1] = 10; return 0; }}
"""


def build_driver(folder: Path) -> Path:
    """Compile the library into ``folder``, which LD_LIBRARY_PATH is to name."""
    assert COMPILER
    (folder / "driver.c").write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(folder / NVML), str(folder / "driver.c")], check=True)
    return folder

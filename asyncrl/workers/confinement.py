"""Confines users' code: to a listed environment, and by isolation from the run if the system allows it.

Invariant: no variable passes that is neither listed here nor named by the user, so no key, token or address of the run
passes. A listed name that looks like a secret passes only if the user names it. A secret value under another name, such
as a proxy's address with a password, does pass. Unless security.isolate_user_code is "off", a worker is isolated before
it runs users' code (isolation.py). If that is impossible, the run is refused or the user is warned, as that key says.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from asyncrl.config.operation import SecurityConfig
from asyncrl.core.errors import ConfigError
from asyncrl.workers import isolation

NOTICE = "isolation"
"""Key of the notice that users' code is not isolated."""
PROBE_S = 30.0
"""Longest time of the probe (s): to start Python and make a few system calls on a host that may be busy."""

SECRET = re.compile(
    r"(?:.*_)?(?:API|ACCESS)?(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(?:_.*)?|.*APIKEY.*", re.IGNORECASE
)
"""Names that look as if their value were a secret."""
LISTED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "LINES", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TMPDIR", "TMP", "TEMP", "XDG_*_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "LD_PRELOAD", "JAVA_HOME", "NLTK_DATA"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    *("CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "KMP_*", "MALLOC_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Patterns of the variables that pass; names are compared in upper case."""


def users_environment(inherited: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables of ``inherited`` that users' code gets: listed ones that are no secrets, and all in ``named``."""
    named = frozenset(named)
    return {name: value for name, value in inherited.items() if name in named or _passes(name)}


def _passes(name: str) -> bool:
    return any(fnmatchcase(name.upper(), pattern) for pattern in LISTED) and not SECRET.fullmatch(name)


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement of one actor's workers. By default they are not isolated, as before a run exists."""

    named: Sequence[str] = ()
    run_dir: Path | None = None
    """Folder of the run. The workers are isolated from it and from its sibling runs; None for no isolation."""

    def env(self) -> dict[str, str]:
        """The environment of a worker that starts now."""
        return users_environment(os.environ, self.named)

    @property
    def arguments(self) -> list[str]:
        """Arguments by which a worker isolates itself (isolation.obey); empty without isolation."""
        return [] if self.run_dir is None else [str(self.run_dir)]


UNISOLATED = Confinement()


async def confine(config: SecurityConfig, run_dir: Path, warn: Callable[[str], None]) -> Confinement:
    """Decide the confinement of an actor's workers. Calls ``warn`` with the reason if they cannot be isolated.

    Raises ConfigError if isolation is required and impossible.
    """
    named = config.user_environment
    if config.isolate_user_code == "off":
        return Confinement(named)
    reason = await why_not(run_dir)
    if not reason:
        return Confinement(named, run_dir)
    if config.isolate_user_code == "required":
        raise ConfigError([f"security.isolate_user_code: users' code cannot be isolated on this host ({reason})"])
    warn(
        f"users' code is not isolated on this host ({reason}): it can read the run's keys, and the memory and "
        "environment of processes of the same user; see docs/security.md"
    )
    return Confinement(named)


async def why_not(run_dir: Path) -> str:
    """Start a probe that isolates itself (isolation.py). Returns the reason that it cannot; empty if it can."""
    probe = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", isolation.__name__, str(run_dir)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PROBE_S):
            _, error_output = await probe.communicate()
    except TimeoutError:
        return f"a process that should isolate itself did not end within {PROBE_S:g} s"
    finally:
        if probe.returncode is None:
            probe.kill()
            await probe.wait()
    lines = error_output.decode(errors="replace").strip().splitlines()
    return "" if probe.returncode == 0 else lines[-1] if lines else f"the probe ended with {probe.returncode}"

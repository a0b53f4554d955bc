"""The environment that users' code is given: variables that programs need to run at all, and those that the user names.
Pure.

Invariant: nothing that is not listed here or named passes, so that no key, token or address of the run or of the user
does; and of what is listed nothing whose name is that of a secret, unless it is named. A variable whose value is secret
and whose name is not (a proxy's address with a password in it) does pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

SECRET = re.compile(
    r"(?:.*_)?(?:API|ACCESS)?(?:KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?(?:_.*)?|.*APIKEY.*", re.IGNORECASE
)
LISTED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "LINES", "LANG", "LANGUAGE", "LC_*", "TZ"),
    *("TMPDIR", "TMP", "TEMP", "XDG_*_HOME"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "LD_LIBRARY_PATH", "LD_PRELOAD", "JAVA_HOME", "NLTK_DATA"),
    *("HF_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "TORCH*", "PYTORCH_*", "TRITON_*"),
    *("CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "KMP_*", "MALLOC_*"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Names, compared in upper case, where * is anything."""


def users_environment(inherited: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables that users' code is given. ``named`` are further ones by their exact names, secret or not."""
    named = frozenset(named)
    return {name: value for name, value in inherited.items() if name in named or _passes(name)}


def _passes(name: str) -> bool:
    return any(fnmatchcase(name.upper(), pattern) for pattern in LISTED) and not SECRET.fullmatch(name)

"""Model FLOPs utilisation (MFU): the share of its devices' peak operations that a step has used. Pure.

A token counts 6 floating-point operations per trained parameter (Kaplan et al. 2020, arXiv:2001.08361) and 4 per frozen
one, which needs no gradient. In a mixture of experts, only the experts that a token takes count. Attention and
recomputed activations are left out, as is usual. Without a known peak there is no MFU.
"""

from __future__ import annotations

import re

PEAK_FLOPS = (
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("GB300", 2.25e15),
    ("GB200", 2.25e15),
    ("GH200", 9.89e14),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100", 9.89e14),
    ("H800", 9.89e14),
    ("H20", 1.48e14),
    ("A100", 3.12e14),
    ("A800", 3.12e14),
    ("L40S", 3.62e14),
    ("L40", 1.81e14),
    ("L4", 1.21e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("RTX 4090", 1.65e14),
)
"""Dense bfloat16 operations a second, as the maker states them, by words of the device's name; the first match
counts."""
SLOWER = re.compile(r"\b(Laptop|MIG|D)\b")
"""Words in a device's name that make it slower than the device of the same name without them."""
OPERATIONS, OF_TRAINED = 4, 2
"""Operations per parameter and token: 2 forward and 2 for the gradient of the layer's input; and 2 more for the
gradient of a trained parameter."""


def peak_flops(device_name: str) -> float | None:
    """Look up a device's dense bfloat16 operations a second; None if they are unknown."""
    if SLOWER.search(device_name):
        return None
    return next((peak for words, peak in PEAK_FLOPS if re.search(rf"\b{words}\b", device_name)), None)


def mfu(*, parameters: int, trained: int, tokens: int, seconds: float, devices: int, device_name: str) -> float | None:
    """Return the share of all devices' peak operations that training on ``tokens`` used in ``seconds``, 0 to 1.

    ``parameters`` is the number of those that compute a token, ``trained`` that of the trained ones among them. Returns
    None if the peak is unknown or ``seconds`` is 0.
    """
    peak = peak_flops(device_name)
    if peak is None or seconds <= 0:
        return None
    return (OPERATIONS * parameters + OF_TRAINED * trained) * tokens / (seconds * devices * peak)

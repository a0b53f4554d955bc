"""Model FLOPs utilisation."""

import pytest

from asyncrl.learner.fsdp.utilisation import mfu, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA H20", 1.48e14),
        ("NVIDIA L40S", 3.62e14),
        ("Graphcore", None),
    ],
)
def test_the_peaks(name, peak):
    assert peak_flops(name) == peak


def test_a_share_of_the_peak_of_all_devices():
    step = {"tokens": 10**6, "seconds": 6.0, "devices": 2, "device_name": "NVIDIA H200"}
    whole, frozen = (mfu(parameters=10**9, trained=trained, **step) for trained in (10**9, 10**7))
    assert whole == pytest.approx(6e15 / (6.0 * 2 * 9.89e14))
    assert frozen == pytest.approx(4.02e15 / (6.0 * 2 * 9.89e14))


def test_what_is_not_known_is_absent():
    assert mfu(parameters=1, trained=1, tokens=1, seconds=1.0, devices=1, device_name="cpu") is None
    assert mfu(parameters=1, trained=1, tokens=1, seconds=0.0, devices=1, device_name="NVIDIA H200") is None

"""Model FLOPs utilisation."""

import pytest

from asyncrl.learner.fsdp.utilisation import mfu, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 9.89e14), ("NVIDIA H100 PCIe", 7.56e14), ("NVIDIA H20", 1.48e14)]
)
def test_utilisation_is_the_share_of_the_peak_of_all_devices(name: str, peak: float) -> None:
    step = {"tokens": 10**6, "devices": 2, "device_name": name}
    whole, frozen = (mfu(parameters=10**9, trained=trained, seconds=6.0, **step) for trained in (10**9, 10**7))
    assert (whole, frozen) == pytest.approx((6e15 / (12.0 * peak), 4.02e15 / (12.0 * peak)))
    assert mfu(parameters=1, trained=1, seconds=0.0, **step) is None
    assert mfu(parameters=1, trained=1, seconds=6.0, **(step | {"device_name": "cpu"})) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA GH200 480GB", 9.89e14),
        ("NVIDIA GB200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", 1.65e14),
        # Cards whose name contains that of another, and parts of a card.
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_whole_words_of_its_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak

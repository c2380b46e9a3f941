"""Resizing on a device, which is the CPU here, against the Pillow that is installed: equal to the
bit.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from mtmd.base.errors import DeviceError
from mtmd.clip.image import device_pillow as pillow
from mtmd.clip.image import device_resize as resizer
from mtmd.clip.image.device_pillow import FILTERS, vertical_first
from mtmd.clip.image.device_resize import DeviceResizer
from mtmd.clip.image.resize import resize
from mtmd.kernels.backends.reference import _Allocations as Allocations


class HostStream:
    """The CPU as a device."""

    device = torch.device("cpu")

    @contextmanager
    def entered(self):
        yield

    def upload(self, shape, fill):
        host = torch.empty(shape, dtype=torch.uint8)
        fill(host)
        return host


def picture(rng, width, height):
    """Noise; in its upper half black and white alone, which sums beyond a byte come of."""
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    half = pixels[: height // 2]
    half[:] = rng.choice(np.array([0, 255], np.uint8), half.shape)
    return pixels


SIZES = (
    ((37, 23), (11, 9)),
    ((37, 23), (90, 71)),
    ((37, 23), (90, 9)),
    ((37, 23), (11, 90)),
    ((64, 48), (64, 20)),
    ((64, 48), (20, 48)),
    ((300, 2), (17, 31)),
    ((2, 300), (31, 17)),
    ((1, 1), (7, 5)),
    ((5, 3), (64, 1)),
    ((3, 301), (1, 30)),
    ((201, 131), (56, 56)),
    ((97, 89), (96, 88)),
    ((33, 31), (34, 32)),
)


@pytest.mark.parametrize("resample", FILTERS)
def test_equal_to_pillow(resample):
    rng, device = np.random.default_rng(1), DeviceResizer(HostStream())
    for given, requested in SIZES:
        pixels = picture(rng, *given)
        result = device.resize(pixels, *requested, resample)
        assert np.array_equal(result, resize(pixels, *requested, resample)), (given, requested)


@pytest.mark.parametrize("seed", range(4))
def test_equal_to_pillow_at_any_size(seed):
    rng, device = np.random.default_rng(seed), DeviceResizer(HostStream())
    for number in range(20):
        sizes = [int(n) for n in rng.integers(1, 80, 4)]
        if number % 2:  # at the border between both orders of passes
            sizes[3] = max(1, sizes[1] - 2 * abs(sizes[0] - sizes[2]) + int(rng.integers(-1, 2)))
        pixels, resample = picture(rng, *sizes[:2]), list(FILTERS)[int(rng.integers(len(FILTERS)))]
        result = device.resize(pixels, *sizes[2:], resample)
        assert np.array_equal(result, resize(pixels, *sizes[2:], resample)), (sizes, resample)


def test_strips_are_joined(monkeypatch):
    monkeypatch.setattr(pillow, "STRIP_BYTES", 4 * 3 * 60)
    rng, device = np.random.default_rng(2), DeviceResizer(HostStream())
    for requested in ((20, 13), (90, 71), (61, 13)):
        pixels = picture(rng, 61, 47)
        result = device.resize(pixels, *requested, "bicubic")
        assert np.array_equal(result, resize(pixels, *requested, "bicubic"))


@pytest.mark.parametrize("requested", [(3990, 4000), (500, 400)], ids=str)
def test_what_a_large_picture_takes_is_what_is_told(requested):
    """Counted on meta tensors: nothing is computed."""

    def along(given, length):
        result = pillow.weights(given, length, "bicubic")
        first, values = (torch.from_numpy(v).to("meta") for v in (result.first, result.values))
        return pillow.DeviceWeights(given, first, values)

    seen = Allocations()
    passes = (pillow.resize_rows, requested[0]), (pillow.resize_columns, requested[1])
    with seen:
        value = torch.empty((4000, 4000, 3), dtype=torch.uint8, device="meta")
        for one, length in passes:
            value = one(value, along(4000, length))
    assert 2 * value.nbytes < seen.peak <= resizer.TAKEN_BYTES <= 128 << 20


def test_both_orders_are_checked():
    assert {vertical_first(given, requested) for given, requested in resizer.CHECKED} == {
        True,
        False,
    }


def test_another_order_than_pillows_is_noticed(monkeypatch):
    monkeypatch.setattr(resizer, "vertical_first", lambda *_: False)
    device = DeviceResizer(HostStream())
    reason = device.why_not("bilinear")
    assert reason == "its result is not Pillow's from 9 x 61 to 23 x 5 pixels (bilinear)"
    assert device.resize(np.zeros((4, 4, 3), np.uint8), 2, 2, "bilinear") == reason


def test_what_stays_on_the_host(monkeypatch):
    device = DeviceResizer(HostStream())
    pixels = np.zeros((4, 4, 3), np.uint8)
    assert device.resize(pixels, 2, 2, "nearest") == "the filter nearest has no form for devices"
    for long, requested in (((1, 2571, 3), (10, 1)), ((2571, 1, 3), (1, 10))):
        reason = device.resize(np.zeros(long, np.uint8), *requested, "box")
        assert reason == "a side becomes more than 256 times shorter"
    monkeypatch.setattr(resizer, "MAX_BYTES", 3 << 20)
    large = np.zeros((2048, 600, 3), np.uint8)
    assert device.resize(large, 8, 8, "box") == "3 MiB, of which 3 are resized on the device"
    assert isinstance(device.resize(pixels, 2, 2, "box"), np.ndarray)


def test_a_device_without_memory_and_one_that_fails(monkeypatch):
    device, pixels = DeviceResizer(HostStream()), np.zeros((4, 4, 3), np.uint8)
    assert device.why_not("box") is None

    def raises(error):
        def resize_rows(*_):
            raise error

        monkeypatch.setattr(resizer, "resize_rows", resize_rows)

    raises(torch.OutOfMemoryError("of 9 GiB"))
    assert device.resize(pixels, 2, 2, "box") == "the device has no memory for it"
    assert DeviceResizer(HostStream()).resize(pixels, 2, 2, "box").startswith("the device has no")
    raises(torch.AcceleratorError("an illegal memory access"))
    with pytest.raises(DeviceError, match=r"while a picture was resized .*illegal"):
        device.resize(pixels, 2, 2, "box")
    raises(NotImplementedError("index_select"))
    assert DeviceResizer(HostStream()).why_not("box") == "index_select"

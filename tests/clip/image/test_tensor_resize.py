"""Resizing as torchvision does it, on processors with and without an exact kernel for bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision_stand_in as reference

from mtmd.clip.image.resize import resize
from mtmd.clip.image.tensor_resize import MODES, resize_tensor

PIXELS = np.random.default_rng(0).integers(0, 256, (53, 70, 3), np.uint8)


@pytest.mark.parametrize("processor", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(24, 40), (111, 37), (140, 106), (1, 2), (70, 53)])
def test_as_torchvision(
    size: tuple[int, int], mode: str, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: processor)
    expected = reference.resize(
        torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous(),
        size[::-1],
        reference.InterpolationMode[mode.upper()],
    )
    actual = resize_tensor(PIXELS, *size, mode)
    assert actual.dtype == np.uint8 and actual.shape == (size[1], size[0], 3)
    np.testing.assert_array_equal(actual, expected.permute(1, 2, 0).numpy())


def test_nearly_as_pillow() -> None:
    """The same filter; where the two round otherwise, a value differs by one."""
    for mode in MODES:
        difference = np.abs(
            resize_tensor(PIXELS, 40, 24, mode).astype(int) - resize(PIXELS, 40, 24, mode)
        )
        assert difference.max() == 1


def test_sealed_pixels_stay_as_they_are() -> None:
    sealed = PIXELS.copy()
    sealed.setflags(write=False)
    np.testing.assert_array_equal(
        resize_tensor(sealed, 20, 30, "bilinear"), resize_tensor(PIXELS, 20, 30, "bilinear")
    )
    np.testing.assert_array_equal(sealed, PIXELS)

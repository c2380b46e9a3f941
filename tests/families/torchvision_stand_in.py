"""The few functions of torchvision that transformers' image processors of LFM2-VL and
Unlimited-OCR, and its video processors call, for environments without torchvision.

Those have no Pillow version, and Pixtral's processor (which has one) imports torchvision for
nothing. All that they decide stays transformers' own code; `resize` and `normalize` are thin
wrappers of torch in torchvision 0.28 too, and `test_oracles.py` compares them with torchvision's
where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL.Image import Resampling, fromarray


class InterpolationMode(Enum):
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(
    image: torch.Tensor,
    size: tuple[int, int],
    interpolation: InterpolationMode | int = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """uint8 [..., C, H, W] to uint8 [..., C, height, width], as
    torchvision.transforms.v2.functional.resize_image.
    """
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    if not isinstance(interpolation, InterpolationMode):  # Pillow's number
        interpolation = InterpolationMode[Resampling(interpolation).name]
    flat = image.reshape(-1, *image.shape[-3:])
    # Without AVX2 torch has no uint8 kernel that is exact: torchvision goes over float there.
    native = (
        interpolation is not InterpolationMode.BILINEAR
        or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )
    result = torch.nn.functional.interpolate(
        flat if native else flat.float(),
        list(size),
        mode=interpolation.value,
        align_corners=False,
        antialias=antialias,
    )
    if not native:
        result = result.round().to(image.dtype)
    return result.reshape(*image.shape[:-2], *size)


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """float [..., C, H, W], as torchvision.transforms.v2.functional.normalize_image."""
    mean, std = (torch.as_tensor(v, dtype=image.dtype).view(-1, 1, 1) for v in (mean, std))
    return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)


def pad(
    image: torch.Tensor, padding: list[int], fill: Any = 0, padding_mode: str = "constant"
) -> torch.Tensor:
    """[..., 3, H, W] with `fill` of each channel left, above, right and below, as
    torchvision.transforms.v2.functional.pad.
    """
    assert padding_mode == "constant"
    left, top, right, bottom = padding
    *lead, height, width = image.shape
    colors = torch.as_tensor(fill, dtype=image.dtype).view(-1, 1, 1)
    result = colors.expand(*lead, top + height + bottom, left + width + right).clone()
    result[..., top : top + height, left : left + width] = image
    return result


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """[..., 3, H, W] within its bounds, as torchvision.transforms.v2.functional.crop_image."""
    return image[..., top : top + height, left : left + width]


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """[..., 3, H, W] as it is, as torchvision.transforms.v2.functional.grayscale_to_rgb has it."""
    assert image.shape[-3] == 3
    return image


def pil_to_tensor(picture: Any) -> torch.Tensor:
    """uint8 [3, H, W], as torchvision.transforms.functional has it."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def to_pil_image(picture: torch.Tensor) -> Any:
    """uint8 [3, H, W] as a picture of Pillow, as torchvision.transforms.functional has it."""
    return fromarray(picture.permute(1, 2, 0).numpy())


@contextmanager
def torchvision_here() -> Iterator[None]:
    """While open, transformers' modules that import torchvision can be imported; what they import
    keeps working afterwards.
    """
    from transformers import utils

    if utils.is_torchvision_available():
        yield
        return
    import transformers.image_processing_backends as backends
    import transformers.video_processing_utils as videos

    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    modules = [ModuleType(name) for name in names]
    for parent, child in pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    vars(modules[-1]).update(
        resize=resize,
        normalize=normalize,
        pad=pad,
        crop=crop,
        grayscale_to_rgb=grayscale_to_rgb,
        InterpolationMode=InterpolationMode,
    )
    older = ModuleType("torchvision.transforms.functional")
    vars(older).update(pil_to_tensor=pil_to_tensor, to_pil_image=to_pil_image)
    vars(modules[1]).update(functional=older)
    vars(backends).update(
        tvF=modules[-1],
        pil_torch_interpolation_mapping={
            Resampling.BILINEAR: InterpolationMode.BILINEAR,
            Resampling.BICUBIC: InterpolationMode.BICUBIC,
            Resampling.LANCZOS: InterpolationMode.LANCZOS,
        },
        is_torchvision_greater_or_equal=lambda _: True,
    )
    vars(videos).update(tvF=modules[-1])
    modules.append(older)
    names = (*names, older.__name__)
    sys.modules.update(dict(zip(names, modules, strict=True)))
    requested = {
        name: getattr(utils, name)
        for name in ("is_torchvision_available", "is_torchvision_v2_available")
    }
    here = {name: lambda: True for name in requested}
    vars(utils).update(here)
    try:
        yield
    finally:
        # Modules that were imported meanwhile have it by name, and choose processors by it later
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("transformers"):
                for name, function in here.items():
                    if vars(module).get(name) is function:
                        setattr(module, name, requested[name])
        for name in names:
            del sys.modules[name]

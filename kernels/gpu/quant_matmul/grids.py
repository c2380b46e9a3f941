"""The grids of the IQ types as one table on the device, which kernels look codes up in: words of
four bytes, of which a row has two, or of IQ3 one. No Triton.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mtmd.kernels.gpu.triton_kernel import Constant
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization import iq_grids
from mtmd.kernels.quantization.bits import grid
from mtmd.kernels.quantization.iq_quants import IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES

# Packed rows, values, values of a row, what a value is multiplied by and what is added: bytes have
# no sign, and IQ1's are in eighths, which its shift is one of.
_GRIDS = {
    "IQ1": (iq_grids.IQ1, IQ1_VALUES, 8, 8, 8),
    "IQ2_XXS": (iq_grids.IQ2_XXS, IQ2_VALUES, 8, 1, 0),
    "IQ2_XS": (iq_grids.IQ2_XS, IQ2_VALUES, 8, 1, 0),
    "IQ2_S": (iq_grids.IQ2_S, IQ2_VALUES, 8, 1, 0),
    "IQ3_XXS": (iq_grids.IQ3_XXS, IQ3_XXS_VALUES, 4, 1, 0),
    "IQ3_S": (iq_grids.IQ3_S, IQ3_S_VALUES, 4, 1, 0),
}
KINDS_OF_GRIDS = frozenset({"IQ1_S", "IQ1_M", *_GRIDS} - {"IQ1"})


def _words(name: str) -> Tensor:
    packed, values, width, times, plus = _GRIDS[name]
    rows = grid(packed, values, width, torch.device("cpu"))
    return (rows * times + plus).to(torch.uint8).contiguous().view(torch.int32).flatten()


def _starts() -> dict[str, int]:
    """The first word of each grid."""
    starts, at = {}, 0
    for name, (packed, values, width, _, _) in _GRIDS.items():
        starts[name] = at
        at += len(packed) * (2 if len(values) <= 4 else 1) // width * (width // 4)
    starts["end"] = at
    return starts


START = _starts()


@lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives whoever asks first
        return torch.cat([_words(name) for name in _GRIDS]).to(device)


_CONSTANT = {"grids": Constant(Type.contiguous((START["end"],), torch.int32), _table)}


def grids_of(*quants: str | None) -> dict[str, Constant]:
    """Return the table as a `Plan` has it where a kernel of these block types looks into it."""
    return _CONSTANT if KINDS_OF_GRIDS.intersection(quants) else {}

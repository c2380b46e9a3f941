"""Makes packages.safetensors: small weights packed by AutoAWQ, GPTQModel and AutoRound, and the
values that two of these packages read out of each file.

    PYTHONPATH=PACKAGES python tests/kernels/checkpoint/quantized/packages.py

PACKAGES is a folder with autoawq 0.2.7, gptqmodel 7.7.0 and auto-round 0.16.1 beside what they
import. They ask for versions of torch and transformers that exclude each other, so tests read what
is made here, and no package is needed for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from quantized_files import affine, ordered
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = Path(__file__).with_name("packages.safetensors")
ROWS, COLUMNS = 32, 128  # codes of 3 bits begin anew after 32
Parts = dict[str, Tensor]


def main() -> None:
    made: Parts = {}
    settings: dict[str, Any] = {}
    for group in (32, 64):
        name = f"awq-{group}"
        settings[name] = {"quant_method": "awq", "bits": 4, "group_size": group}
        _add(made, name, *awq(group))
    for bits, group, symmetric, in_order in (
        *((4, 32, True, True), (4, 64, False, False), (2, 64, False, True)),
        *((3, 64, False, True), (8, 64, True, True)),
    ):
        name = f"gptq-{bits}-{group}{'' if in_order else '-order'}"
        settings[name] = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": not in_order,
        }
        parts, values = gptq(bits, group, symmetric, in_order)
        _add(made, name, parts, values)
        if bits == 4:
            settings[f"{name}-v2"] = settings[name] | {"checkpoint_format": "gptq_v2"}
            _add(made, f"{name}-v2", *gptq(bits, group, symmetric, in_order, version=2))
    for form in ("auto_round", "auto_round:auto_gptq"):
        for bits in (3, 4):
            name = f"{form.replace(':', '-')}-{bits}"
            settings[name] = {
                "quant_method": "auto-round",
                "bits": bits,
                "group_size": 64,
                "packing_format": form,
            }
            _add(made, name, *auto_round(form, bits, 64))
    save_file(made, FILE, {"settings": json.dumps(settings)})


def weight() -> nn.Linear:
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    generator = torch.Generator().manual_seed(1)
    linear.weight.data = torch.randn(ROWS, COLUMNS, generator=generator)
    return linear


def awq(group: int) -> tuple[Parts, Tensor]:
    """Packed by AutoAWQ, which reads it back; so do AutoRound and GPTQModel."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm as by_auto_round
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm as by_autoawq
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm as by_gptqmodel

    linear = weight()
    _, scales, zeros = affine(linear.weight.data, 4, group, symmetric=False)
    packed = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t(), zeros=zeros.t())
    read = [
        by(packed.qweight, packed.qzeros, packed.scales.float(), 4, group).t()
        for by in (by_autoawq, by_auto_round, by_gptqmodel)
    ]
    return _parts(packed, "qweight", "qzeros", "scales"), _same(read, linear)


def gptq(
    bits: int, group: int, symmetric: bool, in_order: bool, version: int = 1
) -> tuple[Parts, Tensor]:
    """Packed by GPTQModel, which reads it back; so does AutoRound where columns are in order."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    from gptqmodel import QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    linear = weight()
    index = torch.arange(COLUMNS) // group if in_order else ordered(COLUMNS, group)
    columns = index.argsort(stable=True)
    _, scales, zeros = affine(linear.weight.data[:, columns], bits, group, symmetric)
    packed = TorchLinear(
        bits=bits,
        group_size=group,
        sym=symmetric,
        desc_act=not in_order,
        in_features=COLUMNS,
        out_features=ROWS,
        bias=False,
    )
    packed.pack_original(linear, scales.float(), zeros.float(), index.int())
    packed.post_init()
    packed.scales = packed.scales.float()
    values = packed.eval().dequantize_weight().t()
    if version == 1:
        config = QuantizeConfig(bits=bits, group_size=group)
        convert_gptq_v2_to_v1_format_module(packed, config)
    parts = _parts(packed, "qweight", "qzeros", "scales", "g_idx")
    parts["scales"] = parts["scales"].half()
    if version == 2:
        return parts, _same([values], linear)
    reader = QuantLinear(bits, group, COLUMNS, ROWS, bias=False, g_idx=True)
    for name, part in parts.items():
        setattr(reader, name, part.float() if name == "scales" else part)
    return parts, _same([values, reader(torch.eye(COLUMNS)).t()], linear)


def auto_round(form: str, bits: int, group: int) -> tuple[Parts, Tensor]:
    """Packed by AutoRound in one of its forms, and read back by it."""
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing

    QuantLinear = dynamic_import_quant_linear_for_packing(form, bits, group, False)
    linear = weight()
    _, scales, zeros = affine(linear.weight.data, bits, group, symmetric=False)
    packed = QuantLinear(bits, group, COLUMNS, ROWS, bias=False)
    packed.device = torch.device("cpu")
    packed.pack(linear, scales.float(), zeros.float(), None, "cpu")
    parts = _parts(packed, "qweight", "qzeros", "scales")
    packed.scales = packed.scales.float()
    return parts, _same([packed(torch.eye(COLUMNS)).t()], linear)


def _parts(packed: nn.Module, *names: str) -> Parts:
    return {name: getattr(packed, name).detach().clone().contiguous() for name in names}


def _same(read: list[Tensor], linear: nn.Linear) -> Tensor:
    """The values, if all readers have the same and they are near the weight."""
    first, *others = (values.detach().float().contiguous() for values in read)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-6, atol=1e-7)
    w = linear.weight.data
    assert float((first - w).square().mean() / w.square().mean()) < 0.5
    return first


def _add(made: Parts, name: str, parts: Parts, values: Tensor) -> None:
    made |= {f"{name}/{part}": tensor for part, tensor in (parts | {"values": values}).items()}


if __name__ == "__main__":
    main()

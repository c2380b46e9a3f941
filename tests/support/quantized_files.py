"""Weights quantized as published checkpoints hold them, by the formats' own packages where these
run on a CPU; AWQ and GPTQ by the packing that AutoAWQ and AutoGPTQ publish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]
"""What a file holds beside each other, by what follows the name of the layer; and the values."""


@dataclass(frozen=True)
class Format:
    """`settings` go into config.json; `quantize` makes a weight [N, K]; `label` is how it is
    called; `kind` the block type that its rows become.
    """

    settings: dict[str, Any]
    quantize: Callable[[Tensor], Made]
    label: str
    kind: str


def fp8_blocks(w: Tensor, size: tuple[int, int] = (128, 128)) -> Made:
    """`weight_scale_inv`, as transformers' FineGrainedFP8 quantizes; blocks ragged at the edges."""
    n, k = w.shape
    rows = torch.arange(n) // size[0]
    columns = torch.arange(k) // size[1]
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            scales[i, j] = w[rows == i][:, columns == j].abs().max() / 448
    each = scales[rows][:, columns]
    codes = (w / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * each


def fp8_tensor(w: Tensor) -> Made:
    """ModelOpt's FP8: one scale, and one for activations, which is not used."""
    scale = w.abs().max() / 448
    codes = (w / scale).to(torch.float8_e4m3fn)
    held = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return held, codes.float() * scale


def compressed(w: Tensor, format: str, order: Tensor | None = None, **args: Any) -> Made:
    """By compressed-tensors; `order` [K] are group numbers of columns."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = QuantizationArgs(**args)
    scheme, size = QuantizationScheme(targets=["Linear"], weights=weights), args.get("group_size")
    held, whole = {"weight": w if order is None else w[:, order.argsort(stable=True)]}, None
    if args["strategy"] == "tensor":
        low, high = w.min().view(1), w.max().view(1)
    else:
        groups = held["weight"].unflatten(1, (-1, size or w.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
    if args["strategy"] == "tensor_group":
        whole = held["weight_global_scale"] = generate_gparam(w.min(), w.max()).view(1)
    held["weight_scale"], zeros = calculate_qparams(low, high, weights, global_scale=whole)
    if not weights.symmetric:
        held["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(format)
    held = compressor.compress(held, scheme)
    values = compressor.decompress(held, scheme)["weight"].float()
    if whole is not None:  # which the package rounds to bf16
        numbers = unpack_fp4_from_uint8(held["weight_packed"], *w.shape, dtype=torch.float32)
        scales = held["weight_scale"].float() / whole
        values = numbers * scales.repeat_interleave(16, 1)
    if order is not None:  # columns in place again, codes too
        back = order.argsort(stable=True).argsort()
        values = values[:, back]
        bits = args["num_bits"]
        held["weight_packed"] = words(codes_of(held["weight_packed"], bits)[:, back], bits)
        held["weight_g_idx"] = order.int()
    return held, values


def modelopt_nvfp4(w: Tensor) -> Made:
    """The same numbers as compressed-tensors', under ModelOpt's names."""
    held, values = compressed(w, "nvfp4-pack-quantized", **NVFP4)
    return {
        "weight": held["weight_packed"],
        "weight_scale": held["weight_scale"],
        "weight_scale_2": (1 / held["weight_global_scale"])[0],
        "input_scale": torch.tensor(0.5),
    }, values


def affine(w: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], fp16 scales and zero points [N, groups]."""
    groups = w.unflatten(1, (-1, group))
    top = (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(-1) / (top // 2)).half()
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / top).half()
        zeros = (-low / scales).round().clamp(1, top)
    codes = (groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, top).flatten(1).int(), scales, zeros.int()


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] into 32-bit words [N, K * bits / 32], the first in the lowest bits."""
    places = torch.arange(codes.shape[1] * bits).view(-1, bits)
    streamed = torch.zeros(len(codes), codes.shape[1] * bits, dtype=torch.int64)
    for bit in range(bits):
        streamed[:, places[:, bit]] = (codes.long() >> bit) & 1
    packed = (streamed.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return packed.to(torch.uint32).view(torch.int32)


def codes_of(packed: Tensor, bits: int) -> Tensor:
    bit = (packed.view(torch.uint32).long().unsqueeze(-1) >> torch.arange(32)) & 1
    return (bit.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)


def gptq(
    w: Tensor,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    less: int = 1,
    order: Tensor | None = None,
) -> Made:
    """AutoGPTQ's packing; `order` [K] are group numbers of columns (`desc_act`)."""
    k = w.shape[1]
    index = torch.arange(k) // group if order is None else order
    columns = index.argsort(stable=True)
    codes, scales, zeros = affine(w[:, columns], bits, group, symmetric)
    codes = codes[:, columns.argsort()]
    values = scales.float()[:, index] * (codes - zeros[:, index]).float()
    held = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words((zeros - less).t().contiguous(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": index.int(),
    }
    return held, values


def awq(w: Tensor, group: int = 128) -> Made:
    """AutoAWQ's packing of version "gemm": 8 rows in a word, those of even numbers first."""
    codes, scales, zeros = affine(w, 4, group, False)

    def pack(matrix: Tensor) -> Tensor:  # [N, M] -> [M, N / 8]
        turned = matrix.t().unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(turned.flatten(1).contiguous(), 4)

    index = torch.arange(w.shape[1]) // group
    values = scales.float()[:, index] * (codes - zeros[:, index]).float()
    held = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.t().contiguous()}
    return held, values


def bnb_4bit(w: Tensor, kind: str = "nf4", nested: bool = False, size: int = 64) -> Made:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(w, quant_type=kind, compress_statistics=nested, blocksize=size)
    parts = {f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    if w.shape[1] % size == 0:
        return {"weight": codes, **parts}, dequantize_4bit(codes, state).float()
    # The package's own way back on a CPU takes rows for whole blocks.
    flat = codes.view(-1)
    looked_up = state.code[torch.stack((flat >> 4, flat & 15), 1).flatten().int()]
    values = looked_up * state.absmax.repeat_interleave(size)[: w.numel()]
    return {"weight": codes, **parts}, values.view(w.shape)


def bnb_8bit(w: Tensor) -> Made:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    codes, scales, _ = int8_vectorwise_quant(w.half())
    held = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return held, int8_vectorwise_dequant(codes, scales).float()


def mlx(w: Tensor, bits: int, group: int, mode: str = "affine") -> Made:
    import mlx.core as mx

    array = mx.array(w.numpy()).astype(mx.bfloat16 if mode == "affine" else mx.float32)
    held = mx.quantize(array, group_size=group, bits=bits, mode=mode)
    names = ("weight", "scales", "biases")
    tensors = {}
    for name, part in zip(names, held, strict=False):
        number = part.dtype == mx.bfloat16
        tensor = torch.from_numpy(np.array(part.astype(mx.float32) if number else part))
        tensors[name] = tensor.bfloat16() if number else tensor
    wide = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in held]
    values = mx.dequantize(*wide, group_size=group, bits=bits, mode=mode).astype(mx.float32)
    return tensors, torch.from_numpy(np.array(values))


def ct(format: str, **args: Any) -> tuple[dict[str, Any], Callable[[Tensor], Made]]:
    """Settings of config.json, and who quantizes by them."""
    weights = {key: str(value) if key == "scale_dtype" else value for key, value in args.items()}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    return settings, partial(compressed, format=format, **args)


def ordered(size: int, group: int) -> Tensor:
    """Group numbers of columns in no order."""
    columns = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    return columns // group


NVFP4: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
GROUPS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
ROWS: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOATS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
MX: dict[str, Any] = {"type": "float", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def _gptq_in_order(w: Tensor, group: int = 64) -> Made:
    return gptq(w, group=group, order=ordered(w.shape[1], group))


def _compressed_in_order(w: Tensor) -> Made:
    return compressed(w, "pack-quantized", ordered(w.shape[1], 64), **GROUPS)


FORMATS = {
    "fp8": Format(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8_blocks,
        "FP8, blocks of 128 x 128",
        "F8_64",
    ),
    "fp8-row": Format(*ct("float-quantized", **FLOATS), "FP8, a scale for each row", "F8_64"),
    "fp8-tensor": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8_tensor,
        "FP8, a scale for each matrix",
        "F8_64",
    ),
    "mxfp8": Format(
        *ct("mxfp8-quantized", num_bits=8, scale_dtype=torch.uint8, **MX),
        "FP8, groups of 32",
        "FP8",
    ),
    "awq": Format(
        {"quant_method": "awq", "group_size": 128}, awq, "AWQ int4, groups of 128", "U4_64"
    ),
    "gptq": Format(GPTQ, gptq, "GPTQ int4, groups of 128", "U4_64"),
    "gptq-32": Format(
        GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"},
        partial(gptq, group=32, symmetric=False, less=0),
        "GPTQ int4, groups of 32",
        "U4_32",
    ),
    "gptq-2": Format(
        GPTQ | {"bits": 2},
        partial(gptq, bits=2, symmetric=False),
        "GPTQ int2, groups of 128",
        "U4_64",
    ),
    "gptq-3": Format(
        GPTQ | {"bits": 3},
        partial(gptq, bits=3, symmetric=False),
        "GPTQ int3, groups of 128",
        "U4_64",
    ),
    "gptq-8": Format(
        GPTQ | {"bits": 8}, partial(gptq, bits=8), "GPTQ int8, groups of 128", "U8_64"
    ),
    "gptq-order": Format(
        GPTQ | {"desc_act": True, "group_size": 64},
        _gptq_in_order,
        "GPTQ int4, groups of 64, columns in an order of their own",
        "GPTQ",
    ),
    "int4": Format(
        *ct("pack-quantized", **GROUPS), "compressed-tensors int4, groups of 64", "U4_64"
    ),
    "int4-zeros": Format(
        *ct("pack-quantized", symmetric=False, **GROUPS | {"group_size": 32}),
        "compressed-tensors int4, groups of 32",
        "U4_32",
    ),
    "int4-order": Format(
        ct("pack-quantized", **GROUPS)[0],
        _compressed_in_order,
        "compressed-tensors int4, groups of 64, columns in an order of their own",
        "INT4",
    ),
    "int8": Format(
        *ct("pack-quantized", **ROWS), "compressed-tensors int8, a scale for each row", "U8_64"
    ),
    "int8-bytes": Format(
        *ct("int-quantized", symmetric=False, **ROWS),
        "compressed-tensors int8, a scale for each row",
        "U8_64",
    ),
    "nvfp4": Format(*ct("nvfp4-pack-quantized", **NVFP4), "NVFP4", "NV4_128"),
    "nvfp4-modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4, "NVFP4", "NV4_128"
    ),
    "mxfp4": Format(
        *ct("mxfp4-pack-quantized", num_bits=4, scale_dtype=torch.uint8, **MX), "MXFP4", "MXFP4"
    ),
    "nf4": Format(BNB, bnb_4bit, "bitsandbytes nf4, blocks of 64", "NF4_64"),
    "nf4-nested": Format(
        BNB, partial(bnb_4bit, nested=True, size=128), "bitsandbytes nf4, blocks of 128", "NF4_64"
    ),
    "fp4": Format(BNB, partial(bnb_4bit, kind="fp4"), "bitsandbytes fp4, blocks of 64", "FP4_64"),
    "bnb-int8": Format(
        BNB | {"load_in_8bit": True}, bnb_8bit, "bitsandbytes int8, a scale for each row", "U8_64"
    ),
    "mlx": Format(
        {"group_size": 64, "bits": 4},
        partial(mlx, bits=4, group=64),
        "MLX 4 bits, groups of 64",
        "A4_64",
    ),
    "mlx-32": Format(
        {"group_size": 32, "bits": 4},
        partial(mlx, bits=4, group=32),
        "MLX 4 bits, groups of 32",
        "Q4_1",
    ),
    "mlx-3": Format(
        {"group_size": 64, "bits": 3},
        partial(mlx, bits=3, group=64),
        "MLX 3 bits, groups of 64",
        "A4_64",
    ),
    "mlx-6": Format(
        {"group_size": 64, "bits": 6},
        partial(mlx, bits=6, group=64),
        "MLX 6 bits, groups of 64",
        "A8_32",
    ),
    "mlx-8": Format(
        {"group_size": 64, "bits": 8},
        partial(mlx, bits=8, group=64),
        "MLX 8 bits, groups of 64",
        "A8_32",
    ),
    "mlx-mxfp4": Format(
        {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        partial(mlx, bits=4, group=32, mode="mxfp4"),
        "MLX MXFP4, groups of 32",
        "MXFP4",
    ),
}

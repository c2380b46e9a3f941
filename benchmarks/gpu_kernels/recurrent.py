"""The gated delta rule and the short convolution: against their references, which run op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpu_kernels.measure import judged, milliseconds, nmse, table


def uses() -> dict[str, tuple[str, Any]]:
    """What is timed: an op and a case of its kernel."""
    import torch

    from mtmd.kernels.gpu import gated_delta, short_conv

    prefill, decoding, bf16 = (2048,), (1,) * 16, torch.bfloat16
    return {
        "delta rule, prefill 2048, H 32, K = V = 128": (
            "gated_delta",
            gated_delta.Case(prefill, 128, 128, 32, 16, bf16),
        ),
        "delta rule, decoding 16 sequences": (
            "gated_delta",
            gated_delta.Case(decoding, 128, 128, 32, 16, bf16),
        ),
        "short convolution, prefill 2048, C 8192, W 4": (
            "short_conv",
            short_conv.Case(prefill, 8192, 4, bf16, "silu"),
        ),
        "short convolution, decoding 16 sequences": (
            "short_conv",
            short_conv.Case(decoding, 8192, 4, bf16, "silu"),
        ),
    }


def kernel_of(op: str) -> tuple[Any, Callable[..., Any]]:
    """The module of an op's kernel, and its launcher."""
    from mtmd.kernels.gpu import gated_delta, short_conv

    module = {"gated_delta": gated_delta, "short_conv": short_conv}[op]
    return module, getattr(module, op)


def checks(device: str) -> Iterator[str | None]:
    """For every case and timed use, None or how it failed."""
    from mtmd.kernels.ops import OPS

    every = [
        (f"{op} {case}", op, case)
        for op in ("gated_delta", "short_conv")
        for case in kernel_of(op)[0].CASES
    ]
    for label, op, case in [*every, *((label, *use) for label, use in uses().items())]:
        module, launch = kernel_of(op)
        given = case.inputs(device)
        wide = [t.float() if t is not None and t.is_floating_point() else t for t in given]
        expected = OPS[op].reference(*wide, **case.options)
        yield judged(label, nmse(launch(*given, **case.options), expected), module.NMSE[case.dtype])


def report(device: str) -> list[str]:
    heads = (
        "use",
        "kernel ms",
        "GB/s",
        "TFLOP/s",
        "reference ms",
        "ratio",
        "by chunks in torch ms",
        "ratio",
    )
    return table(
        "Recurrent ops, against their references, which launch op by op",
        heads,
        (measured(label, op, case, device) for label, (op, case) in uses().items()),
    )


def measured(label: str, op: str, case: Any, device: str) -> list[str]:
    from mtmd.kernels.graph import Node, Type
    from mtmd.kernels.ops import OPS
    from mtmd.kernels.ops.recurrent import gated_delta_chunked

    given, launch = case.inputs(device), kernel_of(op)[1]
    node = OPS[op](
        *(t if t is None else Node("input", (), Type.of(t), {}, "x") for t in given), **case.options
    )
    ours = milliseconds(lambda: launch(*given, **case.options))
    reference = milliseconds(
        lambda: OPS[op].reference(*given, **case.options), replayed=False
    )  # asks where sequences start
    cells = [
        label,
        f"{ours:.4f}",
        f"{OPS[op].bytes(node) / ours / 1e6:.0f}",
        f"{OPS[op].flops(node) / ours / 1e9:.1f}",
        f"{reference:.3f}",
        f"{reference / ours:.1f}",
    ]
    if op != "gated_delta":
        return [*cells, "-", "-"]
    chunked = milliseconds(lambda: gated_delta_chunked(*given, **case.options), replayed=False)
    return [*cells, f"{chunked:.3f}", f"{chunked / ours:.1f}"]

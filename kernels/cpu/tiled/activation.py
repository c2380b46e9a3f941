"""Activations of many values, two streams in and one out, which may be one of them."""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I16, Emitter, Value, vec

LANES = 32
ACTIVATIONS = ("tanh", "none", "quick", "silu")  # the first three are forms of gelu


def emit_activation(e: Emitter, activation: str, dtype: str, gated: bool) -> None:
    """out = f(x), or f(x) * gate

    args: x, gate, out. Units: values. In bfloat16 f is computed to 1e-4 of its value, and rounded
    before it is multiplied, as the op does.
    """
    x, gate, out = e.arg_ptr(0), e.arg_ptr(1), e.arg_ptr(2)
    with_pairs = dtype == "bf16" and e.has("avx512bf16")
    for i, mask in e.spans(e.first, e.last, LANES):
        halves = _read(e, x, dtype, i, mask)
        results = [activated(e, half, activation, dtype) for half in halves]
        if gated:
            others = _read(e, gate, dtype, i, mask)
            results = [
                e.rounded(r, dtype) * other for r, other in zip(results, others, strict=True)
            ]
        if with_pairs:
            stored = e.pairs_of_bf16(*results)
            if mask is None:
                e.store(out, stored, i)
            else:
                e.masked_store(out, stored, i, mask)
        else:
            e.write(out, dtype, i, results[0].concat(results[1]), mask)


def _read(e: Emitter, x: Value, dtype: str, i: Value, mask: Value | None) -> list[Value]:
    kind = vec(F32 if dtype == "f32" else I16, LANES)
    both = e.load(x, kind, i) if mask is None else e.masked_load(x, kind, i, mask)
    halves = [both.shuffle(range(at, at + LANES // 2)) for at in (0, LANES // 2)]
    return halves if dtype == "f32" else [half.bf16_to_f32() for half in halves]


def activated(e: Emitter, x: Value, activation: str, dtype: str) -> Value:
    """f(x), in bfloat16 to 1e-4 of its value."""
    if dtype == "f32":
        return e.silu(x) if activation == "silu" else e.gelu(x, activation)
    if activation == "none":
        return e.gelu(x, activation)
    # x * sigmoid(y) = x / (1 + 2^(-y / ln 2))
    if activation == "tanh":
        square = e.fma(x * x, 0.044715 * -2.302208198, e.f32(-2.302208198, x.lanes))
        power = square * x  # -2 sqrt(2 / pi) / ln 2 (x + 0.044715 x^3)
    else:
        power = x * (-1.4426950408889634 * (1.702 if activation == "quick" else 1.0))
    denominator = e.exp2(power, 3) + 1.0
    if x.lanes == 16 and e.has("avx512f"):
        name = "llvm.x86.avx512.rcp14.ps.512"
        share = e.call(
            name, x.type, denominator, e.f32(0.0, 16), e.const(I16, -1)
        )  # relative error below 6.2e-5; 0 of infinity
        return x * share
    return x / denominator

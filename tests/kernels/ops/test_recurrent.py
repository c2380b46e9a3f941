"""The recurrent ops: their meaning against transformers, states carried over calls, the CPU's forms
and the memory they take.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import draw, node_of
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels import ops
from mtmd.kernels.backends import Backend, Cpu, Reference
from mtmd.kernels.cpu import linear_attention, short_conv
from mtmd.kernels.graph import Node, Type, graph_input
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import make_plan

pytestmark = pytest.mark.usefixtures("poisoned")
FORMS = {"reference": OPS["linear_attention"].reference, "cpu": linear_attention.linear_attention}
CONVOLUTIONS = {"reference": OPS["short_conv"].reference, "cpu": short_conv.short_conv}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nmse(result: Tensor, expected: Tensor) -> float:
    return float(
        (result.double() - expected.double()).square().sum() / expected.double().square().sum()
    )


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def delta_inputs(
    tokens: int, key: int = 24, value: int = 40, heads: int = 4, groups: int = 2, pool: int = 1
) -> list[Tensor]:
    """q, k, v, decay, beta, state"""
    q, k = (F.normalize(random(tokens, groups, key, seed=i), dim=-1) for i in (1, 2))
    return [
        q,
        k,
        random(tokens, heads, value, seed=3),
        -random(tokens, heads, seed=4).square(),
        random(tokens, heads, seed=5).sigmoid(),
        random(pool, key, heads, value, seed=6),
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "key", "value", "heads", "groups"),
    [(1, 24, 40, 4, 2), (130, 24, 40, 6, 2), (64, 16, 16, 3, 3), (70, 8, 5, 2, 1)],
)
def test_the_delta_rule_is_transformers(form, tokens, key, value, heads, groups):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    q, k, v, decay, beta, state = delta_inputs(tokens, key, value, heads, groups)
    decay[tokens // 2] = -300.0  # a reset: differences of sums of decays must keep their digits
    result = FORMS[form](
        q, k, v, decay, beta, state, offsets([tokens]), torch.tensor([0]), scale=key**-0.5
    )
    for rule, allowed in (
        (theirs.torch_recurrent_gated_delta_rule, 1e-12),
        (theirs.torch_chunk_gated_delta_rule, 1e-9),
    ):
        out, last = rule(
            *(x[None] for x in (q, k, v)),
            g=decay[None],
            beta=beta[None],
            initial_state=state.transpose(1, 2),
            output_final_state=True,
        )
        assert (
            nmse(result[:tokens], out[0]) < allowed
            and nmse(result[tokens:].view(key, heads, value).transpose(0, 1), last[0]) < allowed
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "key", "value", "heads", "groups"),
    [(1, 24, 40, 4, 2), (130, 24, 40, 6, 2), (64, 16, 16, 3, 3), (70, 8, 5, 2, 1)],
)
def test_without_delta_it_is_the_scan_of_transformers(form, tokens, key, value, heads, groups):
    """By chunks, and token after token."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as theirs

    q, k, v, _, step, state = delta_inputs(tokens, key, value, heads, groups)
    step[tokens // 2] = 300.0  # a reset: differences of sums of decays must keep their digits
    a, old = -random(heads, seed=7).exp(), state.permute(0, 2, 3, 1)  # [N, H, V, K]
    result = FORMS[form](
        *(q, k, v, step * a, step, state, offsets([tokens]), torch.tensor([0])),
        scale=1.0,
        delta=False,
    )
    out, last = theirs.mamba2_chunk_scan(
        *(v[None], step[None], a, k[None], q[None]),
        chunk_size=32,
        initial_states=old,
        return_final_states=True,
    )
    now, steps = old.clone(), []
    for t in range(tokens):
        expanded = step[t][None, :, None].expand(-1, -1, value), a[:, None, None]
        one = theirs.mamba2_selective_state_update(
            now, v[t][None], expanded[0], expanded[1], k[t][None], q[t][None]
        )
        steps.append(one)
    rows = result[tokens:].view(key, heads, value).permute(1, 2, 0)
    for outputs, state_after, allowed in (
        (torch.cat(steps), now[0], 1e-12),
        (out[0], last[0], 1e-9),
    ):
        assert nmse(result[:tokens], outputs) < allowed
        assert nmse(rows, state_after) < allowed


@pytest.mark.parametrize("form", CONVOLUTIONS)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_convolution_is_transformers(form, activation, width):
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        causal_conv1d_fn,
        causal_conv1d_update,
    )

    x, w, bias = random(300, 24), random(24, width, seed=1), random(24, seed=2)
    kind = None if activation == "none" else activation
    run = CONVOLUTIONS[form]
    fresh = run(
        x,
        w,
        torch.zeros(1, width - 1, 24),
        offsets([300]),
        torch.tensor([0]),
        bias,
        activation=activation,
    )
    torch.testing.assert_close(
        fresh[:300], causal_conv1d_fn(x.t()[None], w, bias, kind)[0].t(), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(fresh[300:], x[-(width - 1) :])
    state = random(1, width - 1, 24, seed=3)
    theirs = F.pad(state[0].t(), (1, 0))[
        None
    ]  # theirs holds `width` inputs, of which the first is not used
    expected = causal_conv1d_update(x[:1].t()[None], theirs, w, bias, kind)[0].t()
    actual = run(x[:1], w, state, offsets([1]), torch.tensor([0]), bias, activation=activation)
    torch.testing.assert_close(actual[:1], expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual[1:], theirs[0].t()[1:])


def test_l2_norm_is_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

    x = random(5, 3, 24)
    torch.testing.assert_close(OPS["l2_norm"].reference(x, eps=1e-6), l2norm(x, eps=1e-6))
    assert OPS["l2_norm"].reference(torch.zeros(2, 4), eps=1e-6).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_is_the_reference_on_random_cases(dtype):
    for seed in range(25):
        inputs, attrs = draw("linear_attention", seed, dtype, strided=bool(seed % 2))
        assert (
            nmse(
                linear_attention.linear_attention(*inputs, **attrs),
                OPS["linear_attention"].reference(*inputs, **attrs),
            )
            < 1e-10
        ), f"seed {seed}"


PARTS = [
    [1, 3],
    [3, 1],
    [7, 0],
    [1, 1],
    [1, 20],
    [18, 6],
]  # tokens of two sequences in successive calls


@pytest.mark.parametrize("backend", [Cpu(), Reference()], ids=lambda b: b.name)
@pytest.mark.parametrize("op", ["linear_attention", "short_conv"])
def test_a_sequence_in_parts_beside_another_is_the_sequence_in_one(op, backend):
    """Outputs are taken and states stored by a plan, into slots 3 and 1 of a pool whose other slots
    stay as they are.
    """
    totals = [sum(part[i] for part in PARTS) for i in (0, 1)]
    slots = torch.tensor([3, 1])
    make = delta_operands if op == "linear_attention" else conv_operands
    whole = [make(n, seed) for seed, n in enumerate(totals)]
    pool = torch.full((5, *whole[0][1].shape[1:]), 7.0)
    pool[slots] = 0.0
    at, got = [0, 0], [[], []]
    for part in PARTS:
        tokens = [
            torch.cat([x[0][i][at[s] : at[s] + part[s]] for s, x in enumerate(whole)])
            for i in range(len(whole[0][0]))
        ]
        out = stored(op, backend, tokens, whole[0][2], pool, offsets(part), slots)
        for s, piece in enumerate(out.split(part)):
            got[s].append(piece)
            at[s] += part[s]
    for s, (tokens, fresh, more) in enumerate(whole):
        state = fresh.clone()
        expected = stored(
            op, Reference(), tokens, more, state, offsets([totals[s]]), torch.tensor([0])
        )
        torch.testing.assert_close(torch.cat(got[s]), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(pool[slots[s]], state[0], atol=1e-5, rtol=1e-5)
    assert (pool[[0, 2, 4]] == 7).all()


def delta_operands(tokens: int, seed: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    *tensors, state = delta_inputs(tokens, 8, 5)
    return [x.roll(seed, 0) for x in tensors], torch.zeros_like(state), []


def conv_operands(tokens: int, seed: int) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    return [random(tokens, 24, seed=seed)], torch.zeros(1, 3, 24), [random(24, 4, seed=9)]


def stored(
    op: str,
    backend: Backend,
    tokens: list[Tensor],
    more: list[Tensor],
    pool: Tensor,
    starts: Tensor,
    slots: Tensor,
) -> Tensor:
    """The outputs; `pool` gets the states."""
    operands = [*tokens, *more, pool, starts, slots]
    state = len(tokens) + len(more)
    leaves = [
        Node("input", (), Type.of(t), {"fill": lambda b, i=i: b[i], "state": i == state}, f"in{i}")
        for i, t in enumerate(operands)
    ]
    packed = OPS[op](
        *leaves,
        name="packed",
        **({"scale": 0.3} if op == "linear_attention" else {"activation": "silu"}),
    )
    count = tokens[0].shape[0]
    saved = ops.state_store(
        leaves[state],
        ops.rows(packed, start=count, stop=packed.shape[0], name="states"),
        leaves[-1],
        name="stored",
    )
    plan = make_plan([ops.rows(packed, start=0, stop=count, name="out"), saved], [backend])
    assert plan.compute_bytes["cpu"] >= packed.type.bytes
    return Executor(plan, Residency()).run(operands)[0].clone()


def test_a_pool_that_is_only_read_may_lie_apart_one_that_is_written_may_not():
    pool = graph_input("pool", (4, 2, 3), torch.float32, lambda b: b.transpose(0, 1))
    separate = torch.zeros(2, 4, 3)
    read = Executor(
        make_plan([ops.l2_norm(pool, eps=1.0, name="read")], [Reference()]), Residency()
    )
    assert read.run(separate)[0].shape == (4, 2, 3)
    rows, slots = (
        graph_input(n, s, t, lambda _, s=s, t=t: torch.zeros(s, dtype=t))
        for n, s, t in (("rows", (2, 3), torch.float32), ("slots", (1,), torch.int64))
    )
    write = Executor(
        make_plan([ops.state_store(pool, rows, slots, name="write")], [Reference()]), Residency()
    )
    with pytest.raises(PlacementError, match="where it is written"):
        write.run(separate)


def test_sequences_that_decode_go_together_as_far_as_their_states_fit_the_cache(monkeypatch):
    calls = []
    step = linear_attention._step_
    monkeypatch.setattr(
        linear_attention,
        "_step_",
        lambda states, *rest: calls.append(states.shape[0]) or step(states, *rest),
    )
    operands, slots = delta_inputs(9, pool=8), torch.arange(8)
    state_bytes = operands[-1][0].nbytes
    mixed = [1, 1, 5, 1, 0, 1]
    for fit, lengths, expected in (
        (9, [1] * 8, [8]),
        (3, [1] * 8, [3, 3, 2]),
        (0, [1] * 3, [1, 1, 1]),
        (9, mixed, [2, 1, 1]),
    ):
        monkeypatch.setattr(linear_attention, "CACHE_BYTES", fit * state_bytes)
        calls.clear()
        count = sum(lengths)
        given = [
            *(x[:count] for x in operands[:-1]),
            operands[-1],
            offsets(lengths),
            slots[: len(lengths)],
        ]
        assert (
            nmse(
                linear_attention.linear_attention(*given, scale=1.0),
                OPS["linear_attention"].reference(*given, scale=1.0),
            )
            < 1e-10
        )
        assert calls == expected


@pytest.mark.parametrize(
    ("op", "changes", "words"),
    [
        ("short_conv", {"activation": "relu"}, "activation 'relu'"),
        ("short_conv", {3: (5,)}, "5 starts"),
        ("short_conv", {1: (24, 1)}, "W of 2"),
        ("short_conv", {2: (3, 2, 24)}, r"expected \[N, 3, 24\]"),
        ("linear_attention", {5: (3, 40, 4, 24)}, r"expected \[N, 24, 4, 40\]"),
        ("linear_attention", {2: (7, 3, 40)}, "H a multiple of G"),
        ("linear_attention", {3: (7, 2)}, "decay"),
        ("linear_attention", {6: (2,)}, "2 starts"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, changes, words):
    shapes = {
        "short_conv": [(7, 24), (24, 4), (3, 3, 24), (3,), (2,)],
        "linear_attention": [
            (7, 2, 24),
            (7, 2, 24),
            (7, 4, 40),
            (7, 4),
            (7, 4),
            (3, 24, 4, 40),
            (3,),
            (2,),
        ],
    }[op]
    attrs: dict[str, Any] = {"activation": "none"} if op == "short_conv" else {"scale": 1.0}
    attrs |= {k: v for k, v in changes.items() if isinstance(k, str)}
    shapes = [changes.get(i, shape) for i, shape in enumerate(shapes)]
    types = [torch.float32] * (len(shapes) - 2) + [torch.int64] * 2
    leaves = [
        graph_input(f"in{i}", s, t, lambda _: None)
        for i, (s, t) in enumerate(zip(shapes, types, strict=True))
    ]
    with pytest.raises(PlacementError, match=words):
        OPS[op](*leaves, **attrs)


def memory_case(
    op: str, lengths: list[int], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Any]]:
    tokens, count = sum(lengths), len(lengths)
    more = [offsets(lengths), torch.arange(count)]
    if op == "short_conv":
        return [
            random(tokens, 512).to(dtype),
            random(512, 4).to(dtype),
            random(count, 3, 512).to(dtype),
            *more,
        ], {"activation": "silu"}
    *values, decay, beta, state = delta_inputs(tokens, 64, 48, 8, 4, count)
    attrs = {"scale": 0.1, "delta": op == "linear_attention"}
    return [*(x.to(dtype) for x in values), decay, beta, state, *more], attrs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [Cpu(), Reference()], ids=lambda b: b.name)
@pytest.mark.parametrize("op", ["linear_attention", "scan", "short_conv"])
def test_the_memory_told_is_what_is_taken(op, backend, dtype, peak_bytes):
    for lengths in ([1] * 8, [300], [30], [200, 1, 1], [1] * 9 + [100], [100, 100]):
        inputs, attrs = memory_case(op, lengths, dtype)
        node = node_of("linear_attention" if op == "scan" else op, inputs, attrs)
        run = backend.lower(node)
        measured, reported = (
            peak_bytes(lambda run=run, inputs=inputs: run(*inputs)),
            node.type.bytes + backend.workspace(node),
        )
        assert measured <= reported * 1.02, f"{lengths}: told {reported}, took {measured}"
        # Types tell how many sequences there are, not how long each is: of several, one may have
        # all tokens.
        assert reported <= measured * (1.2 if len(lengths) == 1 or max(lengths) == 1 else 1.4), (
            f"{lengths}: told {reported}, took {measured}"
        )


@pytest.mark.parametrize("op", ["linear_attention", "short_conv"])
def test_beyond_the_result_the_cpu_takes_no_more_for_a_longer_sequence(op):
    spaces = [
        Cpu().workspace(node_of(op, *memory_case(op, [n], torch.float32))) for n in (128, 512, 2048)
    ]
    assert spaces[0] == spaces[1] == spaces[2]


def test_what_the_ops_count():
    inputs, attrs = memory_case("linear_attention", [5, 2], torch.float32)
    node = node_of("linear_attention", inputs, attrs)
    assert OPS["linear_attention"].flops(node) == 7 * 7 * 8 * 64 * 48
    scan = node_of("linear_attention", inputs, attrs | {"delta": False})
    assert OPS["linear_attention"].flops(scan) == 5 * 7 * 8 * 64 * 48
    values = 7 * (2 * 4 * 64 + 8 * 48 + 2 * 8) * 4 + 2 * 64 * 8 * 48 * 4 + (3 + 2) * 8
    assert OPS["linear_attention"].bytes(node) == values + (7 + 2 * 64) * 8 * 48 * 4
    inputs, attrs = memory_case("short_conv", [5, 2], torch.bfloat16)
    inputs[2] = torch.zeros(50, 3, 512).bfloat16()  # of the pool, only the batch's states are read
    node = node_of("short_conv", inputs, attrs)
    assert OPS["short_conv"].flops(node) == 2 * 7 * 4 * 512
    assert (
        OPS["short_conv"].bytes(node)
        == (7 * 512 + 4 * 512 + 2 * 3 * 512 + (7 + 6) * 512) * 2 + 5 * 8
    )

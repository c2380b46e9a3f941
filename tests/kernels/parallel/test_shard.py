"""Graphs shared out among ranks compute what the whole graph does: every op's rule, on random
decoders with random shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import torch
from ranks import Member, lockstep
from shared_graphs import Maker, Source

from mtmd.kernels import ops
from mtmd.kernels.graph import graph_input, toposort
from mtmd.kernels.parallel.rules import RULES
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.parallel.slices import Slice
from mtmd.kernels.plan.flash_choice import AttentionForm

CASES = 100  # `python tests/kernels/parallel/test_shard.py 10000` for more
STEPS = 2  # a second step reads the states that the first has left


def check(seed: int, given: Sequence[float] = ()) -> Counter[str]:
    """One random graph on ranks of `given` shares or random ones; ops that ran on parts of
    values.
    """
    made, rng = Maker(seed), Random(seed + 1)
    size = len(given) or rng.choice((2, 2, 3, 4))
    some = [rng.choice((1, 1, 1, 2, 3)) for _ in range(size)] if rng.random() < 0.5 else None
    shares = given or some
    shardings = [Sharding(Member(rank, size), shares) for rank in range(size)]
    graphs = [sharding.rewrite(made.outputs) for sharding in shardings]
    whole: list[dict[str, torch.Tensor]] = [{}]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in graphs]
    for _ in range(STEPS):
        (expected,) = lockstep([made.outputs], made.batch, whole)
        for outputs in lockstep(graphs, made.batch, parts):
            assert len(outputs) == len(made.outputs)
            torch.testing.assert_close(outputs[-1], expected[-1], rtol=2e-4, atol=2e-5)
    for name, state in whole[0].items():
        stored = [p[name] for p in parts]
        if name.endswith(".kv") and sum(p.shape[2] for p in stored) == state.shape[2]:
            torch.testing.assert_close(torch.cat(stored, 2), state, rtol=2e-4, atol=2e-5)
        assert all(p.shape[2] <= state.shape[2] for p in stored)
    before = {n.name: n.shape for n in toposort(*made.outputs)}
    return Counter(
        n.op
        for n in toposort(*graphs[0])
        if n.shape != before.get(n.name, n.shape) or any(_is_part(i) for i in n.operands)
    )


def _is_part(node: object) -> bool:
    return isinstance(getattr(node, "attrs", {}).get("source"), Slice)


# Of values that ranks have whole, in these graphs
ON_WHOLE = {"add_rows", "cast", "concat", "embed", "kv_half", "layer_norm", "place_rows", "rows"}

IN_FAMILIES = {"head_matmul"}  # latent attention, which tests/families/test_ranks.py shares out
BELOW = {"add_mixed", "channel_attention", "gaussian_topk"}


def test_random_graphs_compute_what_the_whole_computes() -> None:
    seen = sum((check(seed) for seed in range(CASES)), Counter[str]())
    assert set(RULES) - set(seen) <= ON_WHOLE | IN_FAMILIES | BELOW


def test_a_rank_with_next_to_no_share_has_the_least_there_is() -> None:
    assert check(0, (0.1, 999_999.0))["matmul"]


def test_the_norm_of_a_gated_row_leaves_the_products_around_it_split() -> None:
    """Its parts are brought together, normed, and taken apart again."""
    x, source = torch.randn(3, 4), Source()
    given = graph_input("x", (3, 4), torch.float32, lambda _: x)
    up, gate, down = torch.randn(6, 4), torch.randn(6, 4), torch.randn(5, 6)
    gated = ops.silu_mul(
        *(ops.matmul(given, source.add(n, w), name=n) for n, w in (("gate", gate), ("up", up))),
        name="gated",
    )
    normed = ops.rms_norm(gated, source.add("norm", torch.randn(6)), eps=1e-5, name="norm")
    product = ops.matmul(normed, source.add("down", down), name="down")
    shares = [Sharding(Member(rank, 3), (3, 2, 1)) for rank in range(3)]
    graphs = [sharding.rewrite([product]) for sharding in shares]
    assert not any(sharding.kept_whole for sharding in shares)
    kinds = Counter(node.op for node in toposort(*graphs[1]))
    assert kinds["all_gather"] == kinds["all_reduce"] == 1
    ((expected,),) = lockstep([[product]], {}, [{}])
    for (output,) in lockstep(graphs, {}, [{}, {}, {}]):
        torch.testing.assert_close(output, expected)


def test_the_largest_of_a_gate_leave_the_products_around_it_split() -> None:
    """They are chosen among all of a row, which is brought together, and taken apart again."""
    x, source = torch.randn(3, 4), Source()
    given = graph_input("x", (3, 4), torch.float32, lambda _: x)
    gate, up, down = torch.randn(6, 4), torch.randn(6, 4), torch.randn(5, 6)
    chosen = ops.gaussian_topk(
        ops.matmul(given, source.add("gate", gate), name="gate"), deviations=0.3, name="top"
    )
    other = ops.matmul(given, source.add("up", up), name="up")
    gated = ops.gelu_mul(chosen, other, approximate="tanh", name="gated")
    product = ops.matmul(gated, source.add("down", down), name="down")
    shares = [Sharding(Member(rank, 3), (3, 2, 1)) for rank in range(3)]
    graphs = [sharding.rewrite([product]) for sharding in shares]
    assert not any(sharding.kept_whole for sharding in shares)
    kinds = Counter(node.op for node in toposort(*graphs[1]))
    assert kinds["all_gather"] == kinds["all_reduce"] == 1
    ((expected,),) = lockstep([[product]], {}, [{}])
    for (output,) in lockstep(graphs, {}, [{}, {}, {}]):
        torch.testing.assert_close(output, expected)


def test_how_streams_are_mixed_is_not_shared_out() -> None:
    """Nobody waits for a few numbers of a token: the products that make them are every rank's."""
    streams, source = torch.randn(3, 2, 6), Source()
    given = graph_input("streams", (3, 2, 6), torch.float32, lambda _: streams)
    flat = ops.columns(ops.reshape(given, shape=(3, 12)), start=0, stop=6)
    y = ops.matmul(flat, source.add("router", torch.randn(4, 6)), name="router")
    y = ops.softcap(y, cap=1.0, name="capped")
    y = ops.matmul(y, source.add("mix", torch.randn(4, 4)), name="mix")
    shares = ops.reshape(ops.scale(y, factor=1.0, offset=1.0), shape=(3, 2, 2))
    mixed = ops.add_mixed(given, given, shares, name="mixed")
    sharings = [Sharding(Member(rank, 2)) for rank in range(2)]
    graphs = [sharing.rewrite([mixed]) for sharing in sharings]
    assert not {"all_gather", "all_reduce"} & {n.op for n in toposort(*graphs[0])}
    assert {one.name for one in sharings[0].kept_whole} == {"router", "mix"}
    assert not any(one.refused for one in sharings[0].kept_whole)
    ((expected,),) = lockstep([[mixed]], {}, [{}])
    for (output,) in lockstep(graphs, {}, [{}, {}]):
        torch.testing.assert_close(output, expected)


def test_a_view_that_a_graph_returns_is_whole_on_every_rank() -> None:
    """It shares memory, as a cache that is written in place does, and is nobody's cache."""
    x, w = torch.randn(3, 4), torch.randn(6, 4)
    given = graph_input("x", (3, 4), torch.float32, lambda _: x)
    product = ops.matmul(given, Source().add("w", w), name="up")
    view = ops.reshape(product, shape=(1, 3, 6), name="view")
    graphs = [Sharding(Member(rank, 2), ()).rewrite([view]) for rank in range(2)]
    assert graphs[0][0].op == "all_gather"
    for (output,) in lockstep(graphs, {}, [{}, {}]):
        torch.testing.assert_close(output, (x @ w.T)[None])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["flash", "explicit", "channels"])
def test_heads_with_a_mask_each_and_groups_of_channels_are_shared(size: int, kind: str) -> None:
    source, heads, head, rows = Source(), 6, 4, 5
    x, mask = torch.randn(2, rows, 24), torch.randn(heads, rows, rows)
    given = graph_input("x", (2, rows, 24), torch.float32, lambda _: x)
    added = graph_input("mask", tuple(mask.shape), torch.float32, lambda _: mask)
    q, k, v = (
        ops.reshape(
            ops.matmul(given, source.add(part, torch.randn(24, 24) / 5), name=part),
            shape=(2, rows, heads, head),
            name=f"{part}.heads",
        )
        for part in "qkv"
    )
    if kind == "channels":
        mixed = ops.channel_attention(q, k, v, scale=0.1, name="attn")
    else:
        form = AttentionForm(all_explicit=kind == "explicit")
        mixed = form(q, k, v, added, name="attn", scale=0.1)
    flat = ops.reshape(mixed, shape=(2, rows, 24), name="flat")
    out = [ops.matmul(flat, source.add("out", torch.randn(24, 24) / 5), name="out")]
    shardings = [Sharding(Member(rank, size), ()) for rank in range(size)]
    graphs = [sharding.rewrite(out) for sharding in shardings]
    assert not shardings[0].kept_whole
    (expected,) = lockstep([out], {}, [{}])
    for outputs in lockstep(graphs, {}, [{} for _ in graphs]):
        torch.testing.assert_close(outputs[0], expected[0], rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    import sys

    totals: Counter[str] = Counter()
    for number in range(int(sys.argv[1])):
        totals += check(number)
    print(dict(totals))

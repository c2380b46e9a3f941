"""Layers over several devices: which nodes go with which layer, what crosses, who runs what a
device refuses, what each has to hold, and how layers are shared out.
"""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import combinations
from random import Random

import pytest
import torch
from random_graphs import Source, device, evaluate, given
from stand_in import StandIn

from mtmd.kernels import ops
from mtmd.kernels.backends import Backend, Cpu, Reference
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.flash_choice import AttentionForm, choose
from mtmd.kernels.plan.layer_split import LayerSplit, layer_weights, layers_of, spread
from mtmd.kernels.plan.scheduler import Plan, make_plan

WIDTH, ROWS = 8, 3
BATCH = {
    "ids": torch.tensor([1, 5, 3]),
    "slots": torch.tensor([32, 33, 34]),
    "pages": torch.tensor([1, 3]),
    **{f"kv.{layer}": torch.zeros(2, 128, 1, WIDTH) for layer in range(4)},
}


def decoder(
    layers: int, last_reads: int | None = None, attention: AttentionForm | None = None
) -> list[Node]:
    """Layers with a cache each; the last of them reads the cache of layer `last_reads`."""
    source, attention = Source(), attention or AttentionForm()
    x = ops.embed(
        given("ids", ROWS, dtype=torch.int64), source.node("token_embd.weight", 16, WIDTH), name="x"
    )
    slots, pages = given("slots", ROWS, dtype=torch.int64), given("pages", 2, dtype=torch.int64)
    caches: list[Node] = []
    for layer in range(layers):
        at = f"blk.{layer}"
        k = ops.matmul(x, source.node(f"{at}.attn_k.weight", WIDTH, WIDTH), name=f"{at}.attn_k")
        k = ops.reshape(k, shape=(ROWS, 1, WIDTH), name=f"{at}.attn_k.heads")
        state = given(f"kv.{layer}", 2, 128, 1, WIDTH, state=True)
        caches.append(ops.kv_store(state, k, k, slots, name=f"{at}.kv_store"))
        past = caches[-1] if last_reads is None or layer < layers - 1 else caches[last_reads]
        keys = ops.gather_pages(past, pages, which=0, size=32, name=f"{at}.keys")
        q = ops.matmul(x, source.node(f"{at}.attn_q.weight", WIDTH, WIDTH), name=f"{at}.attn_q")
        q = ops.reshape(q, shape=(1, ROWS, 1, WIDTH), name=f"{at}.attn_q.batch")
        y = attention(q, keys, keys, scale=1.0, name=f"{at}.attn")
        x = ops.add(
            ops.reshape(y, shape=(ROWS, WIDTH), name=f"{at}.flat"), x, name=f"{at}.residual"
        )
    normed = ops.rms_norm(x, source.node("output_norm.weight", WIDTH), eps=1e-6, name="output_norm")
    head = source.node("token_embd.weight", 16, WIDTH)
    return [*caches, ops.matmul(normed, head, name="logits")]


def split_of(*device_of: int, refused: tuple[str, ...] = ()) -> LayerSplit:
    return LayerSplit((device("a", *refused), device("b")), device_of)


def plan_of(outputs: list[Node], split: LayerSplit) -> Plan:
    return make_plan(outputs, [*split.devices, Cpu(native=False), Reference()], split=split)


def test_a_node_goes_with_its_cache_its_name_its_weight_or_those_it_reads():
    nodes = toposort(*decoder(4, last_reads=1))
    layers = {node.name: layer for node, layer in layers_of(nodes).items()}
    assert layers["x"] == 0 and layers["blk.2.attn_k"] == 2
    assert layers["blk.3.kv_store"] == 3 and layers["blk.3.keys"] == layers["blk.3.attn"] == 1
    assert layers["blk.3.residual"] == layers["output_norm"] == layers["logits"] == 3


def test_neighbouring_layers_lie_together_and_the_seam_is_a_copy():
    plan = plan_of(decoder(4), split_of(0, 0, 1, 1))
    assert {s.backend.name for s in plan.steps} == {"a", "b"} and len(plan.splits) == 2
    assert [(c.name, c.attrs["source"], c.attrs["destination"]) for c in plan.copies] == [
        ("blk.1.residual@b", "a", "b")
    ]
    homes = {s.node.name: s.backend.name for s in plan.steps}
    assert homes["x"] == "a" and homes["logits"] == "b" and homes["blk.2.kv_store"] == "b"
    square, table, norm = WIDTH * WIDTH * 4, 16 * WIDTH * 4, WIDTH * 4
    assert plan.weight_bytes == {"a": table + 4 * square, "b": table + 4 * square + norm}
    nodes = toposort(*decoder(4))
    assert layer_weights(nodes, 4) == [
        table + 2 * square,
        2 * square,
        2 * square,
        table + 2 * square + norm,
    ]


def test_layers_that_read_another_layers_cache_go_to_it():
    plan = plan_of(decoder(4, last_reads=1), split_of(0, 0, 1, 1))
    assert plan.backend_of["blk.3.attn"].name == "a"
    assert [c.name for c in plan.copies] == [
        "blk.1.residual@b",
        "blk.3.attn_q.batch@a",
        "blk.3.flat@b",
    ]
    assert all(c.type.bytes <= ROWS * WIDTH * 4 for c in plan.copies), "the cache stays"


def test_what_a_device_refuses_runs_on_the_cpu_and_not_on_another_device():
    plan = plan_of(decoder(4), split_of(0, 0, 1, 1, refused=("add",)))
    where = {s.node.name: s.backend.name for s in plan.steps}
    assert where["blk.0.residual"] == where["blk.1.residual"] == "cpu"
    assert where["blk.2.residual"] == "b"
    assert {r.backend for r in plan.refusals} == {"a"}


def test_attention_is_asked_of_the_device_that_is_to_have_it():
    split = split_of(0, 0, 1, 1, refused=("attention",))
    result = choose(
        lambda form: [decoder(4, attention=form)], [*split.devices, Cpu()], (), "auto", split
    )
    assert result.form.explicit == {"blk.0.attn", "blk.1.attn"} and result.state == "mixed"


@pytest.mark.parametrize("device_of", [(0, 0, 0, 1), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("last_reads", [None, 0])
def test_the_same_values_wherever_the_layers_lie(device_of, last_reads):
    outputs = decoder(4, last_reads)
    expected = evaluate(outputs, BATCH)
    split = LayerSplit(tuple(device(n) for n in "abcd"[: device_of[-1] + 1]), device_of)
    batch = {name: value.clone() for name, value in BATCH.items()}
    actual = Executor(plan_of(outputs, split), Residency()).run(batch)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Fusing(StandIn):
    """One of several devices that fuse, with a memory of its own."""

    def __init__(self, name: str):
        super().__init__(records=False)
        self.name = self.space = name


def test_nodes_of_two_devices_are_not_fused_and_those_of_one_are():
    """The sum that ends a layer and the norm that begins the next."""

    def graph() -> list[Node]:
        source, x = Source(), given("x", ROWS, 64)
        for layer in range(4):
            at = f"blk.{layer}"
            y = ops.rms_norm(
                x, source.node(f"{at}.attn_norm.weight", 64), eps=1e-6, name=f"{at}.attn_norm"
            )
            y = ops.matmul(y, source.node(f"{at}.ffn.weight", 64, 64), name=f"{at}.ffn")
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return [x]

    devices = tuple(Fusing(n) for n in "ab")
    one = make_plan(graph(), [devices[0], Reference()])
    split = make_plan(graph(), [*devices, Reference()], split=LayerSplit(devices, (0, 0, 1, 1)))

    def fused(plan: Plan) -> set[str]:
        return {s.node.name for s in plan.steps if s.node.op == "add_norm"}

    assert len(fused(one)) == 3
    assert fused(one) - fused(split) == {"blk.1.ffn_residual+blk.2.attn_norm"}
    batch = {"x": torch.randn(ROWS, 64)}
    (actual,) = Executor(split, Residency()).run(batch)
    (expected,) = Executor(one, Residency()).run(batch)
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


class NoWorkspace(type(device("a"))):  # type: ignore[misc]
    """A device whose kernels take nothing on the way, so that values are all there is."""

    def __init__(self, name: str):
        super().__init__(Cpu(native=False), ())
        self.name = self.space = name

    def workspace(self, node: Node, exact: bool = True) -> int:  # noqa: ARG002
        return 0


def test_what_each_device_has_to_hold_is_what_it_holds():
    devices: tuple[Backend, ...] = tuple(NoWorkspace(n) for n in "ab")
    plan = make_plan(decoder(4), [*devices, Reference()], split=LayerSplit(devices, (0, 0, 1, 1)))
    residency, users, live, peak = Residency(), Counter[int](), Counter[str](), Counter[str]()
    space = {s.node: s.backend.space for s in plan.steps}
    batch = {name: value.clone() for name, value in BATCH.items()}
    caches = {value.untyped_storage().data_ptr() for value in batch.values()}

    def release(key: int, location: str, size: int) -> None:
        users[key] -= 1
        live[location] -= 0 if users[key] else size

    def look(node: Node, value: torch.Tensor, _: object) -> None:
        storage = value.untyped_storage()
        key, size, location = storage.data_ptr(), storage.nbytes(), space[node]
        if key in caches:
            return
        live[location] += 0 if users[key] else size
        users[key] += 1
        peak[location] = max(peak[location], live[location])
        weakref.finalize(value, release, key, location, size)

    executor = Executor(plan, residency)
    executor.run(batch, look)
    assert dict(residency.bytes) == plan.weight_bytes
    assert set(plan.compute_bytes) == {"a", "b"}
    for position, size in plan.compute_bytes.items():
        inputs = sum(
            n.type.bytes
            for n, s in plan.leaves
            if s == position and n.op == "input" and not n.attrs.get("state")
        )
        assert abs(size / (peak[position] + inputs) - 1) <= 0.05, (
            position,
            size,
            peak[position] + inputs,
        )


def brute(sizes: list[int], room: list[float], alongside: list[int]) -> float:
    def fullest(starts: tuple[int, ...]) -> float:
        bounds = (0, *starts, len(sizes))
        return max(
            (alongside[d] + sum(sizes[bounds[d] : bounds[d + 1]])) / room[d]
            for d in range(len(room))
        )

    return min(fullest(starts) for starts in combinations(range(1, len(sizes)), len(room) - 1))


def test_no_other_way_to_share_layers_out_leaves_more_room():
    rng = Random(7)
    for _ in range(200):
        devices = rng.randint(1, 4)
        sizes = [rng.choice((1, 10, 100, rng.randint(1, 1000))) for _ in range(rng.randint(4, 9))]
        room = [float(rng.randint(1, 2000)) for _ in range(devices)]
        alongside = [rng.choice((0, rng.randint(0, 500))) for _ in range(devices)]
        result = spread(sizes, room, alongside)
        assert list(result) == sorted(result) and set(result) == set(range(devices))
        taken = [
            (alongside[d] + sum(s for s, at in zip(sizes, result, strict=True) if at == d))
            / room[d]
            for d in range(devices)
        ]
        assert max(taken) == pytest.approx(brute(sizes, room, alongside))


def test_shares_are_of_bytes():
    assert spread([1] * 8, [3, 1]) == (0,) * 6 + (1,) * 2
    assert spread([1, 1, 1, 1, 4], [1, 1]) == (0, 0, 0, 0, 1)
    with pytest.raises(ValueError, match="2 layers for 3 devices"):
        spread([1, 1], [1, 1, 1])

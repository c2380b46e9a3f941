"""Running a plan: order, what an observer sees, what is let go, what is shared between runs and
threads.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from random_graphs import RandomGraph, Source, evaluate, given, transformer
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Limited, Reference
from mtmd.kernels.graph import Node
from mtmd.kernels.plan import executor as module
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.resources.result_memory import ResultMemory

pytestmark = pytest.mark.usefixtures("poisoned")


def chain(source: Source) -> Node:
    x = ops.matmul(given("x", 3, 5), source.node("up", 7, 5), name="up")
    x = ops.gelu(x, approximate="none", name="act")
    return ops.matmul(x, source.node("down", 5, 7), name="down")


def executor(
    *outputs: Node,
    rules: tuple[str, ...] = (),
    overwrite: bool = True,
    residency: Residency | None = None,
) -> Executor:
    backends = [Limited(Cpu(), rules), Cpu()] if rules else [Cpu()]
    return Executor(make_plan(outputs, backends, overwrite=overwrite), residency or Residency())


def test_outputs_come_in_the_order_they_were_asked_for():
    source = Source()
    down = chain(source)
    act = down.inputs[0]
    batch = {"x": torch.randn(3, 5)}
    actual = executor(down, act, down).run(batch)
    expected = evaluate([down, act, down], batch)
    assert len(actual) == 3
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_an_observer_sees_every_node_in_order_copies_among_them():
    seen: list[tuple[str, str, Tensor, list[Tensor | None]]] = []
    down, batch = chain(Source()), {"x": torch.randn(3, 5)}
    run = executor(down, rules=("gelu",), overwrite=False)
    run.run(
        batch, lambda node, value, inputs: seen.append((node.name, node.op, value, list(inputs)))
    )
    assert [(name, op) for name, op, *_ in seen] == [
        ("up", "matmul"),
        ("up@cpu", "copy"),
        ("act", "gelu"),
        ("act@limited", "copy"),
        ("down", "matmul"),
    ]
    up, copied, act, *_ = (value for _, _, value, _ in seen)
    assert torch.equal(up, copied) and up.data_ptr() != copied.data_ptr()
    assert seen[2][3][0] is copied, "inputs are those that the kernel was given"
    assert len(seen[0][3]) == 2 and torch.equal(seen[0][3][0], batch["x"])
    torch.testing.assert_close(act, torch.nn.functional.gelu(up))


def test_an_observer_finds_the_result_in_an_input_that_was_overwritten():
    shared = []
    executor(chain(Source())).run(
        {"x": torch.randn(3, 5)},
        lambda n, v, i: shared.append((n.name, v.data_ptr() == i[0].data_ptr())),
    )
    assert shared == [("up", False), ("act", True), ("down", False)]


def test_an_absent_operand_is_none():
    result: dict[str, int] = {}
    node = ops.attention(
        *(given("x", 1, 3, 2, 4),) * 3,
        None,
        given("b", 3, 2, dtype=torch.int32),
        scale=1.0,
        name="attn",
    )
    bounds = torch.tensor([[0, 2]] * 3).int()
    executor(node).run(
        {"x": torch.randn(1, 3, 2, 4), "b": bounds},
        lambda n, _, i: result.update({n.name: [t is None for t in i]}),
    )
    assert result == {"attn": [False, False, False, True, False]}


def test_values_are_let_go_after_their_last_use():
    alive: dict[str, Any] = {}
    at_the_end: list[str] = []

    def look(node: Node, value: Tensor, inputs: list[Tensor | None]) -> None:  # noqa: ARG001
        alive[node.name] = weakref.ref(value)
        if node.name == "blk.1.ffn_residual":
            at_the_end.extend(name for name, value in alive.items() if value() is not None)

    output = transformer(Source(), batch=1, rows=5, width=8, heads=2, ffn=12)
    executor(output, overwrite=False).run({"x": torch.randn(1, 5, 8)}, look)
    assert sorted(at_the_end) == ["blk.1.attn_residual", "blk.1.ffn_down", "blk.1.ffn_residual"]


def test_an_input_is_filled_once_a_run_however_many_memories_read_it():
    calls = []
    x = Node("input", (), given("x", 4).type, {"fill": lambda b: calls.append(1) or b}, "x")
    total = ops.add(
        ops.gelu(x, approximate="none", name="a"), ops.softcap(x, cap=1.0, name="b"), name="c"
    )
    run = executor(total, rules=("softcap",))
    assert len(run.plan.leaves) == 2
    run.run(torch.randn(4))
    assert len(calls) == 1
    run.run(torch.randn(4))
    assert len(calls) == 2


def test_inputs_are_not_written_to():
    batch = torch.randn(4)
    saved = batch.clone()
    x = Node("input", (), given("x", 4).type, {"fill": lambda b: b}, "x")
    executor(ops.softcap(ops.gelu(ops.reshape(x, shape=(2, 2)), approximate="none"), cap=1.0)).run(
        batch
    )
    assert torch.equal(batch, saved)


def test_an_input_of_another_size_or_type_is_refused_with_both():
    run = executor(ops.gelu(given("pixels", 3, 5), approximate="none", name="a"))
    with pytest.raises(
        PlacementError,
        match=r"input pixels was filled with fp32 \[4, 5\], the plan is made for fp32 \[3, 5\]",
    ):
        run.run({"pixels": torch.zeros(4, 5)})
    with pytest.raises(PlacementError, match=r"filled with bf16 \[3, 5\]"):
        run.run({"pixels": torch.zeros(3, 5, dtype=torch.bfloat16)})


def test_an_input_under_other_strides_is_laid_out_as_the_plan_has_it():
    x = Node("input", (), given("x", 4, 6).type, {"fill": lambda b: b}, "x")
    flat, batch = ops.reshape(x, shape=(24,), name="flat"), torch.randn(6, 4).t()
    assert torch.equal(executor(ops.add(flat, flat)).run(batch)[0], batch.reshape(24) * 2)


def store(slots: int = 6) -> list[Node]:
    cache = given("cache", 2, slots, 1, 4, state=True)
    kv = ops.kv_store(
        cache,
        given("k", 2, 1, 4),
        given("v", 2, 1, 4),
        given("at", 2, dtype=torch.int64),
        name="kv",
    )
    return [ops.kv_half(kv, which=0, name="keys"), ops.kv_half(kv, which=1, name="values")]


def test_state_is_written_where_it_lies_and_stays_for_the_next_run():
    run = executor(*store())
    batch = {
        "cache": torch.zeros(2, 6, 1, 4),
        "k": torch.randn(2, 1, 4),
        "v": torch.randn(2, 1, 4),
        "at": torch.tensor([4, 1]),
    }
    keys, values = run.run(batch)
    assert torch.equal(batch["cache"][0, [4, 1]], batch["k"]) and torch.equal(
        values[0, [4, 1]], batch["v"]
    )
    again = run.run({**batch, "k": batch["k"] + 1, "at": torch.tensor([0, 5])})[0]
    assert torch.equal(again[0, [4, 1]], batch["k"]) and torch.equal(
        again[0, [0, 5]], batch["k"] + 1
    )
    assert keys.data_ptr() == again.data_ptr() == batch["cache"].data_ptr()


def test_state_that_would_have_to_be_copied_is_refused():
    cache = torch.zeros(2, 1, 6, 4).transpose(1, 2)
    batch = {
        "cache": cache,
        "k": torch.zeros(2, 1, 4),
        "v": torch.zeros(2, 1, 4),
        "at": torch.tensor([4, 1]),
    }
    run = executor(*store())
    assert run.run(batch)  # one group: these strides say nothing, the memory is contiguous
    wide = {**batch, "cache": torch.zeros(2, 6, 1, 8)[..., :4]}
    with pytest.raises(
        PlacementError, match=r"state cache lies on cpu with strides .*, expected contiguous on cpu"
    ):
        run.run(wide)


def test_weights_are_read_once_for_each_memory_and_shared_between_plans():
    source, residency = Source(), Residency()
    run = executor(chain(source), residency=residency)
    assert source.reads == {"up": 1, "down": 1} and residency.bytes == {"cpu": 2 * 35 * 4}
    for _ in range(3):
        run.run({"x": torch.randn(3, 5)})
    executor(chain(source), residency=residency)
    assert source.reads == {"up": 1, "down": 1}
    executor(chain(source), rules=("gelu",), residency=residency)
    assert source.reads == {"up": 2, "down": 2} and residency.bytes == {"cpu": 280, "limited": 280}


def test_weights_of_another_source_or_type_are_others():
    residency, one, two = Residency(), Source(), Source()
    a, b = one.node("w", 4), two.node("w", 4)
    half = one.node("w", 4, dtype=torch.bfloat16)
    tensors = [residency.get(n, Cpu()) for n in (a, b, half, a)]
    assert (
        len({t.data_ptr() for t in tensors}) == 3
        and tensors[0] is tensors[3]
        and tensors[2].dtype == torch.bfloat16
    )


def test_a_source_lives_as_long_as_its_weights():
    """Weights are kept by the identity of their source, which a dead source would pass on to the
    next object in its place.
    """
    residency, source = Residency(), Source()
    node, alive = source.node("w", 4), weakref.ref(source)
    residency.get(node, Cpu())
    del node, source
    gc.collect()
    assert alive() is not None


def in_threads(count: int, work: Any) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def body(index: int) -> None:
        try:
            gate.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_may_run_one_executor_at_once():
    output = transformer(Source(), batch=2, rows=40, width=32, heads=2, ffn=64)
    run = executor(output, rules=("gelu",))
    batches = [{"x": torch.randn(2, 40, 32)} for _ in range(4)]
    expected = [run.run(b)[0] for b in batches]

    def work(index: int) -> None:
        for _ in range(15):
            assert torch.equal(run.run(batches[index])[0], expected[index])

    in_threads(4, work)


def test_threads_may_make_executors_over_the_same_weights():
    source, residency = Source(), Residency()
    plans = [make_plan([chain(source)], [Cpu()]) for _ in range(4)]
    in_threads(4, lambda index: Executor(plans[index], residency))
    assert source.reads == {"up": 1, "down": 1} and residency.bytes == {"cpu": 280}


@pytest.mark.parametrize("seed", range(6))
def test_an_observer_changes_nothing(seed):
    graph = RandomGraph(seed)
    plan = make_plan(graph.outputs, [Limited(Cpu(), ["matmul", "add:width=8"]), Reference()])
    runs = []
    for observe in (None, lambda *_: None):
        runs.append(
            Executor(plan, Residency()).run({k: t.clone() for k, t in graph.batch.items()}, observe)
        )
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_free_memory_makes_way_for_what_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the peak has been predicted, pieces that a run keeps for later results are given back
    before a step that takes memory elsewhere.
    """
    held: list[int] = []

    class Seen(ResultMemory):
        def leave(self, size: int) -> None:
            super().leave(size)
            held.append(self.bytes)

    monkeypatch.setattr(module, "ResultMemory", Seen)
    x = given("x", 1, 64 * 64, 256)
    wide = ops.gelu(x, approximate="tanh", name="wide")  # of the run's own memory, and used once
    few = ops.pool2d(wide, grid=(64, 64), size=(2, 2), name="few")
    cut = ops.windows(x, grid=(64, 64), size=8, name="cut")  # torch's
    plan = make_plan([few, cut], [Cpu()])
    again, batch = Executor(plan, Residency()), {"x": torch.randn(x.shape)}
    expected = again.run(batch)
    assert held == [], "nothing is known of its memory yet"
    assert plan.compute_bytes["cpu"] < 2.1 * x.type.bytes
    for _ in range(2):
        held.clear()
        result = again.run(batch)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
        assert held[-1] == 0 and len(held) == len(plan.steps)

"""The case in which llama.cpp's tensor parallelism ends in a crash (issues 21686 and 27757, PR
21717, open): Gemma 4 31B on two devices with the cache in the host's memory, `-nkvo`, or weights
there by `-ot`. Here with its layers, heads and groups as published, each 32 to 64 times narrower.
"""

from __future__ import annotations

from typing import Any

import pytest
from gemma4 import gemma4
from random_graphs import device
from test_ranks import Subject, opened, runner_of

from mtmd.kernels.backends import Cpu
from mtmd.kernels.plan.scheduler import Override
from mtmd.llm.engine.runner import Runner
from mtmd.loaded.fitting.layouts import KV_NODES

# Published: 60 layers, width 5,376, 21,504 neurons, window 1,024; 32 heads of 256 on 16 groups, in
# every sixth layer of 512 on 4, whose keys are values.
GEMMA_31B = {
    "hidden_size": 5376 // 64,
    "intermediate_size": 21504 // 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256 // 32,
    "global_head_dim": 512 // 32,
    "attention_k_eq_v": True,
    "sliding_window": 1024 // 64,
    "use_bidirectional_attention": "vision",
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
NO_KV_OFFLOAD = f"{KV_NODES}=cpu"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    oracle = gemma4(tmp_path_factory.mktemp("gemma"), seed=7, text=GEMMA_31B)
    return Subject(opened(oracle), vision=True)


def alongside_a_card() -> list[Any]:
    return [device("card"), Cpu(native=False)]


def on_ranks(
    gemma: Subject, size: int, *overrides: str, count: int = 6, **options: Any
) -> list[Runner]:
    requested = [Override.parse(text) for text in overrides]
    return gemma.check(size, count, backends=alongside_a_card, overrides=requested, **options)


def spaces(runner: Runner, *ops: str) -> set[str]:
    plan = runner.plan(runner.sizes()["decode"])
    return {s.backend.space for s in plan.steps if s.node.op in ops}


@pytest.mark.parametrize(("size", "shares"), [(2, None), (2, (55, 45)), (4, None)], ids=str)
def test_gemma_31b_shared_out_with_the_cache_on_the_host(
    gemma: Subject, size: int, shares: tuple[float, ...] | None
) -> None:
    """`--tp N --no-kv-offload`, in sliding and in global layers."""
    count = 12 if shares else 48
    runners = on_ranks(gemma, size, NO_KV_OFFLOAD, count=count, shares=shares)
    whole = runner_of(gemma.model.checkpoint, gemma.image_tokens)
    heads: dict[str, int] = {}
    for runner in runners:
        assert spaces(runner, "kv_store", "gather_pages", "attention") == {"cpu"}
        assert spaces(runner, "matmul") == {"card"}
        assert set(runner.cache_bytes()) == {"cpu"}
        assert runner.sharding is not None and not runner.sharding.kept_whole
        for name, part in runner.sharding.states.items():
            heads[name] = heads.get(name, 0) + part.shape[2]
    assert sorted(heads.values()) == [4] + [16] * 5
    total = sum(r.cache_bytes()["cpu"] for r in runners)
    assert total == whole.cache_bytes()["cpu"]


@pytest.mark.parametrize(
    "overrides",
    [
        (r"^blk\.5\.(kv_store|keys|values|attn)$=cpu",),
        (r"^blk\.[0-4]\.(kv_store|keys|values|attn)$=cpu",),
        (r"blk\.2\.=cpu", NO_KV_OFFLOAD),
        (r"blk\.\d\.ffn_(gate|up)=cpu",),
        (r"blk\.[05]\.attn_(q|k)=cpu",),
    ],
    ids=["global cache", "sliding caches", "one layer and the caches", "feed-forward", "queries"],
)
def test_parts_on_the_host(gemma: Subject, overrides: tuple[str, ...]) -> None:
    """`--tp 2 -ot ...`: what is copied keeps the part that it is of."""
    for runner in on_ranks(gemma, 2, *overrides):
        plan = runner.plan(runner.sizes()["decode"])
        assert {c.attrs["source"] for c in plan.copies} == {"card", "cpu"}


def test_half_of_the_tower_on_the_host(gemma: Subject) -> None:
    half = [Override.parse(r"v\.blk\.0\.=cpu")]
    for encoder in gemma.check_tower(2, backends=alongside_a_card, overrides=half):
        tile = encoder.family.resolution.tile_type()
        steps = encoder.plan(1, tile.shape).steps
        assert {s.backend.space for s in steps if s.node.op == "attention"} == {"card", "cpu"}


def test_one_expert_layer_on_the_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of two that share each layer's experts, with the caches there as well."""
    text = GEMMA_31B | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 44,
    }
    oracle = gemma4(tmp_path_factory.mktemp("experts"), seed=9, text=text)
    subject = Subject(opened(oracle), vision=True)
    for runner in on_ranks(subject, 2, r"blk\.3\.ffn_moe=cpu", NO_KV_OFFLOAD):
        assert spaces(runner, "moe") == {"card", "cpu"}

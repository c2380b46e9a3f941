"""Attention to a paged cache, of sequences that decode and of prompts that are read beside them:
pages read where they lie, against pages gathered and then attended to, and against torch's
attention on keys that lie together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpu_kernels.attention import compare
from gpu_kernels.ceilings import COPY, PRODUCT
from gpu_kernels.predictions import cells_of
from gpu_kernels.rows import Aim, Cells, Row, Setting, Task, must

PAGE = 32  # slots of a page in llm/state.py
NO_CLIFF = 1.10  # of 16 sequences' time a sequence, what more of them may take at most
TITLE = "Attention to a paged cache"


class Batch(NamedTuple):
    """Sequences of which each has `keys` tokens with the one that is decoded, and `prompts` of as
    many, the last `new` of which are read; one in twenty of the cache's pages is another's.
    """

    sequences: int
    keys: int
    heads: int = 32
    groups: int = 8
    width: int = 128
    prompts: int = 0
    new: int = 512

    def __str__(self) -> str:
        words = [f"{self.sequences} x {self.keys} keys"] * bool(self.sequences)
        if self.prompts:
            words.append(f"{self.prompts} x {self.new} tokens of a prompt over {self.keys}")
        shape = f"GQA {self.heads} over {self.groups}, head {self.width}"
        return f"{' and '.join(words)}, {shape}"

    @property
    def small(self) -> Batch:
        """For Triton's interpreter, with more than one share of the keys."""
        count = min(self.sequences, 2)
        return Batch(count, 64, 4, 2, self.width, min(self.prompts, 1), 20)

    @property
    def counts(self) -> list[int]:
        """New tokens of each sequence."""
        return [1] * self.sequences + [self.new] * self.prompts


# 17 after 16: no cliff is wanted there.
BATCHES = (
    Batch(16, 2048),
    Batch(17, 2048),
    Batch(1, 2048),
    Batch(1, 8192),
    Batch(1, 8192, 8, 4, 256),
    Batch(32, 2048),
    Batch(64, 2048),
    Batch(0, 8192, prompts=1),
    Batch(16, 8192, prompts=1),
    Batch(16, 8192, 8, 4, 256, prompts=1),
    Batch(128, 2048),
    Batch(4, 2048),
    Batch(1, 8192, 16, 2, 512),
)


def tasks(setting: Setting) -> Iterator[Task]:
    apiece: dict[int, float] = {}  # ms of one of so many sequences
    for batch in BATCHES:
        yield Task(str(batch), functools.partial(measured, batch, apiece, setting))


def programs(target: str) -> Iterator[Any]:  # noqa: ARG001 - as the others' are called
    """What the timed batches launch, gathering left out."""
    import torch

    from mtmd.kernels.gpu.paged_attention.kernel import KERNEL
    from mtmd.kernels.graph import Type

    for batch in BATCHES:
        tokens, pages = sum(batch.counts), len(batch.counts) * batch.keys // PAGE
        stored = pages + pages // 20 + 1
        yield from KERNEL.launched(
            Type.contiguous((1, tokens, batch.heads, batch.width), torch.bfloat16),
            Type.contiguous((2, stored * PAGE, batch.groups, batch.width), torch.bfloat16),
            Type.contiguous((pages,), torch.int64),
            Type.contiguous((tokens, 2), torch.int32),
            Type.contiguous((len(batch.counts) + 1,), torch.int64),
            size=PAGE,
            scale=batch.width**-0.5,
        )


def problem(batch: Batch, device: str, exact: bool = False) -> tuple[Any, Any, Any, Any, Any]:
    """q bf16 or fp32 [1, T, H, K]; a cache [2, S, G, K]; pages i64, those of sequence after
    sequence, mixed; bounds i32 [T, 2]; starts i64 [sequences + 1].
    """
    import torch

    dtype = torch.float32 if exact else torch.bfloat16
    rng = torch.Generator(device).manual_seed(0)
    counts = torch.tensor(batch.counts)
    count = len(counts) * batch.keys // PAGE
    stored = count + count // 20 + 1

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng, device=device).to(dtype)

    q = draw(1, sum(batch.counts), batch.heads, batch.width)
    cache = draw(2, stored * PAGE, batch.groups, batch.width)
    pages = torch.randperm(stored, generator=torch.Generator().manual_seed(0))[:count]
    first = torch.arange(len(counts)).mul(batch.keys).repeat_interleave(counts)
    # The last of a sequence's new tokens is its last key.
    own = torch.cat([torch.arange(batch.keys - n, batch.keys) for n in batch.counts])
    bounds = torch.stack([first, first + own], 1).to(torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return q, cache, pages.to(device), bounds.to(device), starts.to(device)


def gathered(cache: Any, pages: Any) -> tuple[Any, Any]:
    from mtmd.kernels.ops import OPS

    gather = OPS["gather_pages"].reference
    return gather(cache, pages, which=0, size=PAGE), gather(cache, pages, which=1, size=PAGE)


def attended(q: Any, cache: Any, pages: Any, bounds: Any, starts: Any) -> Any:
    from mtmd.kernels.gpu.table import KERNELS

    run = KERNELS["paged_attention"][0].load().run
    return run(q, cache, pages, bounds, starts, size=PAGE, scale=q.shape[-1] ** -0.5)


def attended_gathered(q: Any, cache: Any, pages: Any, bounds: Any) -> Any:
    from mtmd.kernels.gpu.table import KERNELS

    run = KERNELS["attention"][0].load().run
    return run(q, *gathered(cache, pages), None, bounds, scale=q.shape[-1] ** -0.5)


def measured(batch: Batch, apiece: dict[int, float], setting: Setting) -> Row:
    label, real = str(batch), batch
    if setting.dry:
        batch = batch.small
    q, cache, pages, bounds, starts = problem(batch, setting.device, exact=setting.dry)
    k, v = gathered(cache, pages)
    options = {"scale": q.shape[-1] ** -0.5}
    result = attended(q, cache, pages, bounds, starts)
    must(compare(f"paged, {label}", (q, k, v, None, bounds), result, options))
    ours = setting.milliseconds(lambda: attended(q, cache, pages, bounds, starts))
    both = setting.milliseconds(lambda: attended_gathered(q, cache, pages, bounds))
    cells: Cells = {
        "batch": label,
        "kernel ms": ours,
        **cells_of(
            "paged_attention",
            (q, cache, pages, bounds, starts),
            {"size": PAGE, **options},
            ours,
            setting,
        ),
        "us a sequence": 1e3 * ours / len(batch.counts),
        **_rate(batch, ours, setting),
        "gathered, then attention ms": both,
        "ratio": both / ours,
        **_torchs(batch, q, k, v, ours, setting),
    }
    aims = []
    if real[1:] == BATCHES[0][1:]:  # the same but for how many there are
        apiece[real.sequences] = ours / batch.sequences
        if real.sequences > BATCHES[0].sequences:
            before = apiece.get(BATCHES[0].sequences)
            against = None if before is None else apiece[real.sequences] / before
            name = f"{label}: a sequence, against {BATCHES[0].sequences}"
            aims.append(Aim(name, against, maximum=NO_CLIFF))
    return Row(cells, TITLE, tuple(aims))


def _rate(batch: Batch, ms: float, setting: Setting) -> dict[str, float | str]:
    """Of keys and values read once for each sequence, or of arithmetic where a prompt is read."""
    counts = batch.counts
    read = 2 * 2 * len(counts) * batch.keys * batch.groups * batch.width / ms * 1e3
    seen = sum(n * batch.keys - n * (n - 1) // 2 for n in counts)
    done = 4 * seen * batch.heads * batch.width / ms * 1e3
    rate, of = (done, PRODUCT) if batch.prompts else (read, COPY)
    share = setting.part_of(rate, of)
    unit = f"{done / 1e12:.0f} TFLOP/s" if batch.prompts else f"{read / 1e9:.0f} GB/s"
    return {"rate": unit, "of ceiling": "-" if share is None else share}


def _torchs(
    batch: Batch, q: Any, k: Any, v: Any, ours: float, setting: Setting
) -> dict[str, float | str]:
    """Of sequences that decode alone: torch's has one length for all."""
    import torch.nn.functional as F

    heads = "torch SDPA without pages ms", "its ratio"
    if batch.prompts:
        return dict.fromkeys(heads, "-")
    k, v = (
        x.view(batch.sequences, batch.keys, batch.groups, batch.width).transpose(1, 2)
        for x in (k, v)
    )
    rows = q.view(batch.sequences, 1, batch.heads, batch.width).transpose(1, 2)
    took = setting.milliseconds(
        lambda: F.scaled_dot_product_attention(rows, k, v, scale=batch.width**-0.5, enable_gqa=True)
    )
    return dict(zip(heads, (took, took / ours), strict=True))

"""docs/gpu.md: predictions for cards that are not here, and the formula that they rest on.

python tools/gpu_predictions.py > docs/gpu.md     half a minute; needs no GPU, no weights, no Triton
"""

from __future__ import annotations

from collections.abc import Iterator

from mtmd.bench.shapes import random_checkpoint
from mtmd.inspect.predict_target import predict
from mtmd.inspect.prediction import DRIVER_BYTES, Prediction
from mtmd.inspect.prediction_text import render_comparison
from mtmd.kernels.estimate.cards import CARDS
from mtmd.kernels.estimate.links import ANY, LINKS, OF_CARD, REACHED
from mtmd.kernels.estimate.roofline import AMD, FAST, MIDDLE, NVIDIA, SLOW
from mtmd.kernels.estimate.unpacking import CYCLES
from mtmd.kernels.gpu.quant_matmul.cases import KINDS

MODELS = ("smolvlm-256m", "gemma-3-4b", "qwen3-vl-8b", "pixtral-12b")
COMPARED = ("rtx3090", "rtx4090", "l40s", "h100", "mi300x")
COUNTED = ("smolvlm-256m", "gemma-3-4b", "qwen3-vl-8b", "lfm2-vl-1.6b", "qwen2.5-vl-7b")

TEXT = """# GPUs

Written by `python tools/gpu_predictions.py > docs/gpu.md`. Do not edit by hand.

    mtmd warmup --target rtx4090 -m MODEL                            # one card, in full
    mtmd warmup --target rtx4090 --random-weights gemma-3-4b         # without having the model
    mtmd warmup --target h100,rtx4090,mi300x -m MODEL                # one table
    mtmd warmup --target cuda:90 --memory 24GiB --json               # an architecture; for programs
    mtmd warmup --target list

**Nothing here was run on a GPU.** Memory is what the plans say, by the rule that a loaded model lets work in (`mtmd/loaded/memory_admission.py`).
Which op runs by which kernel is asked of the same table that a GPU uses; registers, shared memory and spills are the compiler's (they
need Triton, `pip install 'mtmd[gpu]'`, all else does not). Times are estimates, each with a range.

## On a machine with a GPU

    python benchmarks/gpu.py --budget 240 --out FOLDER       # in four minutes, what decides most
    python benchmarks/gpu.py --only sanitizer tests          # parts by name, or all of one op's kernels: --only moe
    python benchmarks/gpu.py --dry-run                       # on any machine: what would be run, tried with small problems
    pytest --device cuda                                     # kernels' cases, the families' tiny models, the demo model

`benchmarks/gpu.py` goes through parts in the order of their worth (`benchmarks/gpu_kernels/parts.py`), each for so many seconds at most; `--budget` is shared out among 1 to 3,
so that each of them is made at least in part, and parts for which too little is left are left out:

1. What the card copies and multiplies.
2. At once, by all cores: every case of every kernel compiled, run and compared with its op's reference, one of each op and then another; the demo model's answers against the
   CPU's; and golden checkpoints, if a folder `shared/golden` is in the repository or beside it, against the tokens that transformers gave.
3. Decoding in the shape of Gemma 3 4B in BF16, Q4_K and Q8_0 with 1 to 64 sequences: tokens a second, and the share of what the card copies. Attention at head size 72
   against each of torch's. Pictures of 896 px against transformers, and the first picture after the start against the tenth.
4. Attention at other head sizes, compute-sanitizer, an 8B model, attention to pages, quantized products, all other kernels, resized pictures, `pytest --device`.

Each row says what was aimed at, whether it was reached, and what is predicted below: times of kernels, steps, encodes and the first picture, and memory. A row that fails, takes its process or the device down, or never ends, costs itself: the part
goes on after it in another process. `lines.jsonl` has every row as soon as it is there, and `report.md` and `report.json` are written once a second at most, so a script that is killed leaves what it has measured.
It needs torch, Triton, numpy, Pillow, safetensors and tokenizers, transformers to be compared with, pytest for the tests, and no network. The package need not be installed; for
pytest, where it cannot be (setuptools before 77), `PYTHONPATH=$(python tools/editable_types.py) pytest --device cuda`. [Its dry run](../benchmarks/results/2026-11-28-gpu-dry-run.md).

## Compiled ahead

    mtmd warmup -m MODEL --target cuda:90 --save kernels      # here, without a GPU, with Triton
    mtmd serve -m MODEL --kernels kernels                     # there; or MTMD_KERNELS=kernels

`--save` writes what the model launches on that architecture: a manifest (versions of mtmd and Triton, target, model, size and SHA-256 of each file) and two
files for each program, 10 to 100 programs of a model. `--kernels` (`load(kernels=...)` in Python) compares them and puts them into Triton's cache on that
machine (`TRITON_CACHE_DIR`, `~/.triton/cache`), where a launch looks. Another target, another Triton or build of it, other tools (NVIDIA's `ptxas`) or Triton variables, kernels
of another mtmd, and files that are not as they were saved are refused with a line that says which. The warm-up says how many of the programs that it foresees were
among them, and warns where none was: they are of another model. A digest is no signature: take kernels from whom you would take a program. `MTMD_KERNELS` may be set
for a whole machine: on its CPU, and for CLIP and SigLIP, it is noted and not used. A save that fails leaves the programs of the one before.

Programs are compiled for what a launch looks at: types, sizes that are constants, whether numbers are multiples of 16, where tensors begin, how much memory they span.
Both ways ask Triton's own code for that, and a test compares the keys of every launch of every kernel's cases. What is foreseen: every number of answers at once,
prompts of one token to the most that are read at once, with and without pictures and proposals; every batch of tiles at the sizes of the
warm-up, of the largest picture and of usual ones; of attention of the encoder our kernel as it comes and in every form that may be measured to be the fastest,
once it is measured in that one. Of a family that takes pictures in their own size, small ones (up to 2,048 patches) of any sizes are encoded in one run, which is rounded up to 128
patches: plans for these 16 lengths are made beforehand. So a new size of a small picture is neither planned nor compiled while somebody waits, and from the third run of a length on it is
replayed ([estimated gain](../benchmarks/results/2026-11-23-packing.md)). A larger picture may still meet a shape that was not foreseen. Where a program is compiled while an answer waits, the receipt and a line in
the log say so, and `mtmd_programs_compiled_total` in `/metrics` counts it.

On a GPU that is here `mtmd warmup`, and `mtmd serve` before it answers, compile what the cache lacks, as many at once as there are processors; `--no-run` and
`--no-warmup` compile nothing. **Not run on a GPU**: tested with a driver in its place, to where Triton would load the program.

## Memory

    needed = weights + cache of all answers + kept + resizing + recorded + workspaces
    compute = max(prefill x 9/8, (decode + encode) x 9/8)
    kept = min(compute x 8/7, compute + 256 MiB)        compute, and the cache of encoded pictures
    usable = (memory - {driver} MiB) x 15/16

`prefill`, `decode` and `encode` are the predicted peaks of those plans; `resizing` are 120 MiB where the card resizes pictures (`--preprocess`). {driver} MiB stand for the driver's context and the libraries' code,
an assumption: it differs by card and version. `workspaces` are those that torch gives cuBLAS and cuBLASLt (hipBLAS, hipBLASLt) for each stream on which matrices are multiplied, the
decoder's and the encoder's, and twice as much where their runs are recorded, on streams of their own: 33 MiB from compute capability 9.0 on, 9.1 below, 108 of AMD's cards and 204 of
`gfx94x` and `gfx95x` (`kernels/backends/cuda_device.py`; `CUBLAS_WORKSPACE_CONFIG` changes them). `recorded` is what recorded runs (below) keep beside all that, of the decoder and of the encoder: the values of the largest, 128 MiB at
most, and twice the memory that results are returned in, rounded up to a power of two: logits of every answer with seven proposed tokens, embeddings of the largest picture
whose encode is recorded. Nothing where a model lies on several devices: no run of it is recorded, but the encoder's.

## Times

For one run of a plan:

    device = sum over nodes of max(bytes / (bandwidth x eb), FLOPs / (rate x ef), cycles / (clock x ei), launches x floor)
    host   = torch launches x t + Triton launches x u + nodes x step, or replay + outputs x t
    time   = max(host, device)

The bound that is told is `launches` where the host is slower, else what takes most of the device's time; `unpacking` is that of `cycles`. Bytes, FLOPs and launches are
counted from the plan: what torch computes is called on meta tensors; each call that reaches its dispatcher, views aside, is a launch that
reads its inputs and writes its result; a Triton kernel is one launch, two where attention shares out its keys, five for experts. FLOPs of attention are those of all keys, also of those that a causal mask or a window hides.
Under a window, attention to a cache reads the window. Copies between host and card, image decoding and sampling are not counted. A plan
that can be recorded as a CUDA graph is one replay for the host: all of one device whose values take at most 128 MiB (with more the
device takes several times as long as the launches), from the third run of a shape on. The outputs of a replay (logits, embeddings) are copied, in memory of their own, and counted with the rest; caches and recurrent states are
written where they lie.

| factor | | NVIDIA: slow, middle, fast | AMD: slow, middle, fast |
|---|---|---|---|
{factors}

### Cycles: quantized weights, unpacked

    cycles = sum over kernels of programs x rows of w of a program x values of a row x cycles of a weight
    clock  = 128 threads' cycles x multiprocessors x clock rate x min(1, programs / multiprocessors)

A kernel unpacks each weight once for every block of its rows of x; for experts, as many blocks as a router fills that chooses all experts equally often. 128 threads' cycles of a multiprocessor are
half the card's published fp32 FLOPs (all of them for `cuda:80`). Of a weight, counted for `cuda:90` with Triton 3.9, x in 16 bits, by `python benchmarks/gpu_kernels/instructions.py --all`,
by kernel and rows of x of a block (of types that are tried in few shapes experts were not counted, and are taken to need what products do):

{cycles}

### Where the factors come from

They are assumptions, to be replaced by measurements of `benchmarks/gpu.py`; the range is meant to hold the truth, and nobody has checked it.

- eb, fast: a copy on an H200 reaches about 4.3 of its 4.8 TB/s, 0.90. Products of one row reach less; 0.75 is in the middle of what is commonly reported.
- eb of quantized weights: no measurement; latency, of loads of two to sixteen bytes, is unknown, so slow is low. What is under way for it was counted (`benchmarks/results/2026-11-23-quantized-reads.md`).
- ei: no measurement either; few rows wait for memory, tiles for matrix instructions. Fast memory (H200, B200) waits for instructions, that of an RTX 4090 or L4 need not. AMD's instructions were not counted: its eb of quantized weights is lower for it.
- ef of products, fast: a bf16 product of 8192 x 8192 matrices by cuBLAS on an H200 reaches about 790 of 989 TFLOP/s, 0.80. On an MI300X about 620 of 1,307 are reported, 0.47.
- ef of attention: 280 to 350 of 989 TFLOP/s from the order of instructions in the compiled kernel (head 72); 0.46 is Triton's published 459 TFLOP/s at head 128 on an H100 (the FlashAttention-3 paper).
- t: the host's time for an op of torch, some microseconds on any machine. u: planning and binding took 51 us for attention and 16 us for a quantized product on a two-core machine, launch left out; norms have less to plan.
- replay: one launch of a graph of some hundred nodes, and filling and copying the inputs; tens of microseconds are reported.
- step: 0.3 ms for the 924 nodes of a step of Gemma 3 4B, without kernels. floor: what a kernel takes that has nothing to do.
- AMD's other factors are NVIDIA's, taken lower and wider: less is known.

## Cards

As published: dense rates (no sparsity) with sums in fp32.

{cards}

## Several cards

    mtmd warmup --target h100 --tp 2 --random-weights qwen3-8b

Beside what one card does, each of N such cards: its memory, its collectives, and a step over each link that may tie them together, by the rank with
most to do. A collective takes the device, after the model by which NCCL chooses its protocols (`src/graph/tuning.cc`: rings in one machine):

    steps  = 2 (N - 1) of an all_reduce, N - 1 of an all_gather
    handed = bytes x steps / N                                   bytes of the whole value; each card sends and receives as many
    simple = (8.4 us + steps x wait) x late + handed / (rate x el)
    low    = (3.6 us + steps x low wait) x late + handed / (rate x el x part)
    time   = min(simple, low)

`rate` is the link's; of a mesh, where every two cards have a link of their own, that of N - 1 of them.
A100, H100 and H200 come on boards of eight with switches and on boards of four without, whose cards have a third of their links to each other one: both are told, as no card's name says which it is.
`part` is 1/4 of an all_reduce, 1/3 of an all_gather, as the low-latency protocol sends a flag with every word. By torch.distributed a collective costs the
host {host} us (slow, middle, fast), `el` is {el}, `late` {late}: assumptions, as above. A plan with collectives is not recorded as a CUDA graph, so on fast cards the host's
launches are the bound. **Not run on several GPUs.**

{links}

## Four models on five cards

    mtmd warmup --target {compared} --random-weights MODEL

{tables}

## Launches

Of one step of decode, of a prefill of 2,048 tokens and of an encode at the warm-up's size. Each costs the host `t` or `u` where a plan is not
recorded, and the device `floor` everywhere: what the bound `launches` comes from.

| model | layers | decode | a layer | by Triton nodes | prefill | encode |
|---|---|---|---|---|---|---|
{launches}
"""
NAMES = {
    "bandwidth": ("eb", "part of the published bandwidth"),
    "quantized": ("eb, quantized", "of products with quantized weights"),
    "instructions": ("ei", "of the cycles of threads, in unpacking those weights"),
    "product": ("ef", "part of the published rate, products"),
    "attention": ("ef, attention", "attention and the gated delta rule"),
    "torch_launch": ("t", "us, a launch by torch"),
    "triton_launch": ("u", "us, a launch by Triton"),
    "floor": ("floor", "us, the least a kernel takes"),
    "step": ("step", "us, a node"),
    "replay": ("replay", "us, a plan that is recorded"),
}


def factor_rows() -> Iterator[str]:
    for name, (symbol, meaning) in NAMES.items():
        unit = 1e6 if name in ("torch_launch", "triton_launch", "floor", "step", "replay") else 1
        cells = [
            ", ".join(
                f"{value * unit:g}" if (value := getattr(table[which], name)) else "not counted"
                for which in (SLOW, MIDDLE, FAST)
            )
            for table in (NVIDIA, AMD)
        ]
        yield f"| {symbol} | {meaning} | {cells[0]} | {cells[1]} |"


def cycle_rows() -> Iterator[str]:
    forms = [f"{name.removesuffix('_kernel')} {rows}" for name, rows in CYCLES]
    yield f"| type | {' | '.join(forms)} |"
    yield "|---|" + "---|" * len(forms)
    for kind in KINDS:
        yield (
            f"| {kind} | "
            + " | ".join(f"{counted[kind]:.1f}" for counted in CYCLES.values())
            + " |"
        )


def card_rows() -> Iterator[str]:
    yield "| name | card | target | multiprocessors | GiB | GB/s | TFLOP/s bf16, fp32 | source |"
    yield "|---|---|---|---|---|---|---|---|"
    for c in CARDS.values():
        assert c.memory_bytes and c.bandwidth and c.flops_16 and c.flops_32
        yield (
            f"| `{c.name}` | {c.title} | `{c.target}` | {c.multiprocessors} | "
            f"{c.memory_bytes / 2**30:.0f} | {c.bandwidth / 1e9:,.0f} | {c.flops_16 / 1e12:g}, "
            f"{c.flops_32 / 1e12:g} | {c.source} |"
        )


def link_rows() -> Iterator[str]:
    yield "| link | GB/s each way | wait, low wait, us | cards at most | between | source |"
    yield "|---|---|---|---|---|---|"
    for link in LINKS.values():
        cards = ", ".join(f"`{name}`" for name, links in OF_CARD.items() if link.name in links)
        maximum = "any" if link.maximum == ANY else str(link.maximum)
        rate = f"{link.bandwidth / 1e9:,.4g}" + " x (N - 1)" * link.is_mesh
        yield (
            f"| {link.title} | {rate} | {link.wait * 1e6:g}, "
            f"{link.low_wait * 1e6:g} | {maximum} | {cards} | {link.source} |"
        )


def reached(name: str, unit: float = 1.0) -> str:
    return ", ".join(f"{getattr(REACHED[way], name) * unit:g}" for way in (SLOW, MIDDLE, FAST))


def compared(model: str) -> str:
    """As the command prints it."""
    return render_comparison([predict(c, random_weights=model, compile=False) for c in COMPARED])


def launch_row(model: str) -> str:
    report: Prediction = predict("h100", random_weights=model, compile=False)
    layers = len(random_checkpoint(model, "BF16").text.layers)
    work = {w.graph: w for w in report.work}
    step = work["decoder, decode"]
    triton = sum(op.launches for op in step.ops if "Triton" in op.kernel)
    encode = f"{work['encoder, warm-up'].launches:,}" if "encoder, warm-up" in work else "-"
    return (
        f"| {model} | {layers} | {step.launches:,} | {step.launches / layers:.1f} | {triton:,} | "
        f"{work['decoder, prefill'].launches:,} | {encode} |"
    )


def main() -> None:
    text = TEXT.format(
        driver=DRIVER_BYTES >> 20,
        factors="\n".join(factor_rows()),
        cycles="\n".join(cycle_rows()),
        cards="\n".join(card_rows()),
        links="\n".join(link_rows()),
        host=reached("host", 1e6),
        el=reached("part"),
        late=reached("late"),
        compared=",".join(COMPARED),
        tables="\n\n".join(f"```\n{compared(model)}\n```" for model in MODELS),
        launches="\n".join(map(launch_row, COUNTED)),
    )
    print(text, end="")


if __name__ == "__main__":
    main()

"""Models in published shapes, with random weights: decoding, and encoding pictures, as answers do
both. What a step has to read is held against what the card copies, and what was estimated without
the card against what was measured.
"""

from __future__ import annotations

import atexit
import functools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_kernels.ceilings import COPY, PRODUCT
from gpu_kernels.demo import warm_up
from gpu_kernels.measure import host_milliseconds
from gpu_kernels.predictions import card_of
from gpu_kernels.rows import Aim, Cells, Once, Row, Setting, SkipError, Task, synchronize

BATCHES = (1, 16, 17, 32, 64)
PROMPT, STEPS, BEFORE, ROUNDS = 512, 64, 8, 3
NO_CLIFF, OF_16 = 1.10, 16
MIN_SHARE = {
    "BF16": 0.75,
    "Q8_0": 0.60,
    "Q4_0": 0.50,
    "Q4_K": 0.50,
}  # of copying, with one sequence
ESTIMATED = (0.75, 1.25)  # parts of what was measured
MEMORY = (0.90, 1.15)  # predicted, parts of what was taken
SIDE, PICTURES, TENTH, QUESTION = 896, (1, 4), 10, 16
FASTER, FIRST = 1.5, 1.2
# Sizes for a dry run, by the names in a configuration.
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 640,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
}
SMALL_VISION = {
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": 56,
}
SMALL_PROMPT, SMALL_STEPS = 20, 3


def decoding(shape: str, weights: str, setting: Setting) -> Iterator[Task]:
    model = Once(lambda: Decoding(shape, weights, setting))
    yield Task("loaded and warmed up", lambda: model().loaded())
    for batch in BATCHES:
        make = functools.partial(lambda batch: model().decoded(batch), batch)
        yield Task(sequences(batch), make)
    yield Task("synchronising calls of a step", lambda: model().waits())
    yield Task("memory", lambda: memory(model().name, model().subject, setting))


def sequences(count: int) -> str:
    return f"{count} sequences" if count > 1 else "1 sequence"


class Decoding:
    """A decoder, with as many sequences as were asked about so far."""

    def __init__(self, shape: str, weights: str, setting: Setting):
        self.name, self.weights, self.setting = f"{shape} {weights}", weights, setting
        self.prompt = SMALL_PROMPT if setting.dry else PROMPT
        self.steps = SMALL_STEPS if setting.dry else STEPS
        self.shape = small_shape(shape) if setting.dry else shape
        self.subject = self._subject()
        self.read: list[Any] = []
        self.apiece: dict[int, float] = {}  # ms a token, by sequences
        self.late = 0
        self.predicted = Once(lambda: predicted(self.shape, weights, self.subject, setting))

    def _subject(self) -> Any:
        from mtmd.bench.subject import Subject
        from mtmd.options.load import LoadOptions

        return Subject(
            None,
            self.shape,
            LoadOptions(
                device=self.setting.device,
                dtype="bf16",
                weights=self.weights,
                parallel=max(BATCHES),
            ),
            prompt=self.prompt,
            resolution=SIDE,
            images=0,
            decode=self.steps,
            detail="auto",
        )

    def loaded(self) -> Row:
        cells: Cells = {"model": self.name, "load s": self.subject.open_ms / 1e3}
        cells |= warm_up(self.subject.model)
        return Row(cells, "Models, loaded and warmed up")

    def filled(self, count: int) -> Any:
        """So many sequences that have read their prompts."""
        from mtmd.bench.subject import Prefilled

        subject = self.subject
        while len(self.read) < count:
            spans = subject.prompt(self.prompt, [], [])
            self.read.append(subject.prefill(spans, len(self.read)))
        result = self.read[:count]
        return Prefilled(tuple(r for r, _ in result), tuple(token for _, token in result))

    def decoded(self, batch: int) -> Row:
        ready, subject, compiled = self.filled(batch), self.subject, late()
        subject.decode(ready, min(BEFORE, self.steps))  # steps are recorded by the third
        actual = []
        for _ in range(1 if self.setting.dry else ROUNDS):
            subject.synchronize()
            start = time.perf_counter()
            subject.decode(ready, self.steps)
            subject.synchronize()
            actual.append((time.perf_counter() - start) * 1e3 / self.steps)
        ms = statistics.median(actual)
        read = sum(size for _, size in subject.decode_work(ready))
        share = self.setting.part_of(read / ms * 1e3, COPY)
        shape = subject.decode_shape(ready)
        expected = self.predicted().decode_ms(shape)
        self.apiece[batch] = ms / batch
        cells: Cells = {
            "model": self.name,
            "sequences": batch,
            "step ms": ms,
            "tokens/s": batch / ms * 1e3,
            "GB/s": read / ms / 1e6,
            "of copy": "-" if share is None else share,
            "estimated ms": expected,
            "estimated / measured": expected / ms,
            "compiled meanwhile": late() - compiled,
        }
        label = f"{self.name}, {sequences(batch)}"
        aims = [Aim(f"{label}: estimated / measured", expected / ms, *ESTIMATED)]
        aims.append(Aim(f"{label}: compiled meanwhile", late() - compiled, maximum=0))
        if batch == 1:
            minimum = MIN_SHARE[self.weights]
            aims.insert(0, Aim(f"{label}: of copying", share, minimum=minimum))
        if batch > OF_16:
            before = self.apiece.get(OF_16)
            against = None if before is None else self.apiece[batch] / before
            cells["a token, against 16"] = "-" if against is None else against
            aims.insert(0, Aim(f"{label}: a token, against 16", against, maximum=NO_CLIFF))
        else:
            cells["a token, against 16"] = "-"
        return Row(cells, "Decoding", tuple(aims))

    def waits(self) -> Row:
        """How often the host waits for the device in one step: once, for the tokens."""
        ready, steps = self.filled(1), 4
        result = waits_in(lambda: self.subject.decode(ready, steps), self.setting)
        each = len(result) / steps
        cells: Cells = {"model": self.name, "a step": each}
        cells["where"] = "; ".join(sorted(set(result)))[:200]
        aim = Aim(f"{self.name}: synchronising calls of a step", each, maximum=1)
        return Row(cells, "Synchronising calls", (aim,))


def encoding(shape: str, weights: str, setting: Setting) -> Iterator[Task]:
    model = Once(lambda: Encoding(shape, weights, setting))
    yield Task("loaded and warmed up", lambda: model().loaded())
    yield Task("the first picture, against the tenth", lambda: model().first())
    for count in PICTURES:
        make = functools.partial(lambda count: model().encoded(count), count)
        yield Task(f"{count} x {SIDE} px, against transformers", make)
    yield Task("synchronising calls of an encode", lambda: model().waits())
    yield Task("memory", lambda: memory(f"{model().name}, encode", model().subject, setting))


class Encoding:
    """A tower, and what transformers has of the same shape."""

    def __init__(self, shape: str, weights: str, setting: Setting):
        from mtmd.bench.subject import Subject
        from mtmd.options.load import LoadOptions

        self.name, self.setting = shape, setting
        self.side = SMALL_VISION["image_size"] if setting.dry else SIDE
        self.shape = small_shape(shape) if setting.dry else shape
        self.subject = Subject(
            None,
            self.shape,
            LoadOptions(device=setting.device, dtype="bf16", weights=weights),
            prompt=64,
            resolution=self.side,
            images=1,
            decode=8,
            detail="auto",
        )
        self.theirs = Once(self._theirs)
        self.predicted = Once(lambda: predicted(self.shape, weights, self.subject, setting))

    def loaded(self) -> Row:
        cells: Cells = {"model": self.name, "load s": self.subject.open_ms / 1e3}
        cells |= warm_up(self.subject.model)
        return Row(cells, "Models, loaded and warmed up")

    def first(self) -> Row:
        """From pixels to the first token of an answer, of ten pictures that nobody has seen."""
        result, compiled, tokens = [], late(), 0
        self.subject.start_service()
        try:
            for _ in range(TENTH):
                start = time.perf_counter()
                tokens = self.subject.first_token(self.side, 1, QUESTION)
                result.append((time.perf_counter() - start) * 1e3)
        finally:
            self.subject.stop_service()
        first, tenth = result[0], result[-1]
        plans = self.subject.prepare(self.side, 1)
        expected = self.predicted().encode_ms(self.subject.encode_shapes(plans))
        expected += self.predicted().prefill_ms(tokens, sum(plan.tokens for plan in plans))
        cells: Cells = {"model": self.name, "first ms": first, "tenth ms": tenth}
        cells |= {"ratio": first / tenth, "compiled meanwhile": late() - compiled}
        cells |= {"estimated ms, of the card": expected, "estimated / measured": expected / tenth}
        aims = (
            Aim(f"{self.name}: the first picture, against the tenth", first / tenth, maximum=FIRST),
            Aim(f"{self.name}: compiled meanwhile", late() - compiled, maximum=0),
        )
        return Row(cells, "A picture after the start, to the first token", aims)

    def encoded(self, count: int) -> Row:

        subject, setting = self.subject, self.setting
        plans = subject.prepare(self.side, count)

        def ours() -> None:
            subject.encode(plans)
            synchronize(setting.device)

        took = host_milliseconds(ours)
        work = subject.encode_work(plans)
        rate = sum(flops for flops, _ in work) / took * 1e3
        share = setting.part_of(rate, PRODUCT)
        expected = self.predicted().encode_ms(subject.encode_shapes(plans))
        theirs = host_milliseconds(self.theirs()(count))
        label = f"{self.name}, {count} x {SIDE} px"
        cells: Cells = {
            "pictures": label,
            "encode ms": took,
            "TFLOP/s": rate / 1e12,
            "of bf16 product": "-" if share is None else share,
            "transformers SDPA ms": theirs,
            "ratio": theirs / took,
            "estimated ms": expected,
            "estimated / measured": expected / took,
        }
        aims = (
            Aim(f"{label}: against transformers SDPA", theirs / took, minimum=FASTER),
            Aim(f"{label}: estimated / measured", expected / took, *ESTIMATED),
        )
        return Row(cells, "Encoding pictures, from tiles on the host to embeddings", aims)

    def _theirs(self) -> Callable[[int], Callable[[], None]]:
        """transformers' tower with random weights, on pixels that lie on the device, without what
        comes after it.
        """
        import torch

        from mtmd.bench.shapes import read_shape

        try:
            from transformers import SiglipVisionConfig, SiglipVisionModel
        except ImportError as absent:
            raise SkipError(f"transformers is not here: {absent}") from absent
        _, config, _ = read_shape(self.shape)
        vision = config.part("vision_config")
        settings: dict[str, Any] = {
            name: vision.count(name) for name in (*SMALL_VISION, "patch_size")
        }
        settings |= {"vision_use_head": False, "attn_implementation": "sdpa"}
        device = torch.device(self.setting.device)
        with device:
            model: Any = SiglipVisionModel(SiglipVisionConfig(**settings))
        model = model.to(torch.bfloat16).eval()

        def of(count: int) -> Callable[[], None]:
            pixels = torch.randn(count, 3, self.side, self.side, device=device)
            pixels = pixels.to(torch.bfloat16)

            def run() -> None:
                with torch.inference_mode():
                    model(pixel_values=pixels)
                synchronize(self.setting.device)

            return run

        return of

    def waits(self) -> Row:
        plans = self.subject.prepare(self.side, 1)
        result = waits_in(lambda: self.subject.encode(plans), self.setting)
        cells: Cells = {"model": f"{self.name}, encode", "a step": len(result)}
        cells["where"] = "; ".join(sorted(set(result)))[:200]
        return Row(cells, "Synchronising calls")


class Predicted:
    """The same model on the same card, without the card."""

    def __init__(self, model: Any, card: Any):
        self.model, self.card = model, card

    def decode_ms(self, shape: Any) -> float:
        return self._ms(self.model.runner.plan(shape))

    def prefill_ms(self, tokens: int, images: int) -> float:
        """Of a prompt of so many tokens, some of them a picture's."""
        from mtmd.llm.batch import BatchShape

        runner = self.model.runner
        batch = BatchShape(tokens, images).rounded(False, runner.pages)
        return self._ms(runner.plan(batch))

    def encode_ms(self, batches: list[tuple[int, tuple[int, ...]]]) -> float:
        return sum(self._ms(self.model.encoder.plan(*batch)) for batch in batches)

    def _ms(self, plan: Any) -> float:
        import torch

        from mtmd.kernels.estimate.roofline import estimate

        with torch.no_grad():
            result = estimate(plan, self.model.backends[0], self.card)
        if result is None:
            raise SkipError(f"nothing is published of {self.card.title}")
        return float(result.ms)


def predicted(shape: str, weights: str, subject: Any, setting: Setting) -> Predicted:
    from mtmd.inspect.predict_target import subject_of

    card, options = card_of(setting), subject.model.options
    model = subject_of(
        card.name,
        None,
        shape,
        weights=weights,
        dtype=options.dtype,
        context=options.context,
        parallel=options.parallel,
    )
    return Predicted(model, card)


def memory(name: str, subject: Any, setting: Setting) -> Row:
    """Memory that the model was predicted to take, and what the card lacks after it has worked."""
    import torch

    from mtmd.loaded.predicted_memory import predicted_bytes

    space = subject.model.backends[0].space
    expected = predicted_bytes(subject.model.loaded)[space] / 2**30
    taken = None
    if not setting.dry:
        free, total = torch.cuda.mem_get_info(setting.device)
        taken = (total - free) / 2**30
    ratio = None if taken is None else expected / taken
    cells: Cells = {"model": name, "predicted GiB": expected}
    cells |= {"taken GiB": "-" if taken is None else taken}
    cells |= {"predicted / taken": "-" if ratio is None else ratio}
    return Row(cells, "Memory", (Aim(f"{name}: memory, predicted / taken", ratio, *MEMORY),))


def late() -> int:
    """Programs compiled so far that no warm-up had foreseen."""
    from mtmd.kernels.gpu.ahead.compilations import compilations

    return compilations().late


def waits_in(run: Callable[[], Any], setting: Setting) -> list[str]:
    """The places where the host waits for the device meanwhile, as torch sees them."""
    import torch

    if setting.dry:
        run()
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [
        f"{Path(w.filename).name}:{w.lineno}"
        for w in seen
        if "synchroniz" in str(w.message).lower()
    ]


@functools.cache
def small_shape(name: str) -> str:
    """The file of a configuration like the published one, for a machine without a GPU."""
    from mtmd.bench.shapes import TABLE

    published = json.loads(TABLE.read_text())[name]
    config = published["config"]
    text = config.get("text_config", config)
    text |= {key: value for key, value in SMALL.items() if key in text}
    if vision := config.get("vision_config"):
        vision |= SMALL_VISION
        config["mm_tokens_per_image"] = 4
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    side = SMALL_VISION["image_size"]
    image = published.get("image", {}) | {"size": {"height": side, "width": side}}
    (Path(folder.name) / "preprocessor_config.json").write_text(json.dumps(image))
    return str(Path(folder.name) / "config.json")

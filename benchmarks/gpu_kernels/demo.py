"""The demo model on the GPU: its warm-up, which compares every op with its reference, and its
answers, which are to be the CPU's.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_kernels.rows import Cells, Once, Row, Setting, Task, WrongError

ROOT = Path(__file__).parents[2]
PICTURES = 4
COUNT, DESCRIBE = "How many shapes are there?", "Describe the image."
TITLE = "The demo model, against the CPU"
TYPES = ("fp32", "auto")


def tasks(setting: Setting) -> Iterator[Task]:
    """In fp32, in which answers are the CPU's token by token, and in the type that is chosen for
    the device, in which they should be.
    """
    with tempfile.TemporaryDirectory() as folder:
        requested = Once(lambda: questions(Path(folder)))
        right = Once(lambda: [on_cpu().answer(*one).text for one in requested()])
        for dtype in TYPES:
            there = Once(functools.partial(on_device, dtype, setting))
            yield Task(f"warm-up, {dtype}", functools.partial(warmed_up, dtype, there))
            for number in range(PICTURES + 2):
                make = functools.partial(answered, number, dtype, there, requested, right)
                yield Task(f"answer {number + 1}, {dtype}", make, dtype == TYPES[0])
            make = functools.partial(together, dtype, there, requested, right)
            yield Task(f"answers at once, {dtype}", make, dtype == TYPES[0])


def questions(folder: Path) -> list[tuple[Path, str]]:
    """Of pictures of the demo model's world, and of one that everybody has."""
    sys.path.insert(0, str(ROOT / "tools" / "demo_model"))
    from world import draw  # type: ignore[import-not-found]

    rng, drawn = random.Random(11), dict[int, Path]()
    while len(drawn) < PICTURES:
        image, facts = draw(rng)
        if facts.things and len(facts.things) not in drawn:
            drawn[len(facts.things)] = folder / f"{len(facts.things)}.png"
            image.save(drawn[len(facts.things)])
    pictures = list(drawn.values())
    example = ROOT / "examples" / "shapes.png"
    return [*((p, COUNT) for p in pictures), (pictures[-1], DESCRIBE), (example, DESCRIBE)]


def on_device(dtype: str, setting: Setting) -> Any:
    from mtmd.finding import find_checkpoint
    from mtmd.model import Model
    from mtmd.options.load import LoadOptions

    options = LoadOptions(device=setting.device, dtype=dtype)
    checkpoint, name = find_checkpoint(None, options)
    return Model(checkpoint, options, name=name)


@functools.cache
def on_cpu() -> Any:
    """The ops' references, in fp32."""
    from mtmd.finding import find_checkpoint
    from mtmd.kernels.backends import Reference
    from mtmd.model import Model
    from mtmd.options.load import LoadOptions

    options = LoadOptions(device="cpu", dtype="fp32")
    checkpoint, name = find_checkpoint(None, options)
    return Model(checkpoint, options, [Reference()], name=name)


def warmed_up(dtype: str, there: Once[Any]) -> Row:
    return Row(warm_up(there()), f"Warm-up of the demo model, {dtype}")


def warm_up(model: Any) -> dict[str, float | str]:
    """What a warm-up did. Raises WrongError where an op is not as its reference, or no op of a kind
    is taken.
    """
    import time

    start = time.perf_counter()
    report = model.warm_up()
    cells: Cells = {"warm-up s": time.perf_counter() - start}
    if wrong := [text for check in report.checks for text in check.failed]:
        raise WrongError("; ".join(wrong))
    for check in report.checks:
        cells[f"{check.graph}: first ms"] = check.first_ms
        cells[f"{check.graph}: steady ms"] = check.steady_ms
    if report.programs is not None:
        cells["programs"] = report.programs.needed
        cells["compiled"] = report.programs.compiled
    cells["nodes elsewhere"] = report.elsewhere
    return cells


def answered(
    number: int, dtype: str, there: Once[Any], requested: Once[Any], right: Once[list[str]]
) -> Row:
    picture, question = requested()[number]
    actual, expected = there().answer(picture, question).text, right()[number]
    if actual != expected:
        raise WrongError(f"{actual!r}, expected {expected!r}")
    cells = {"type": dtype, "picture": picture.name, "question": question, "answer": actual}
    return Row(cells, TITLE)


def together(dtype: str, there: Once[Any], requested: Once[Any], right: Once[list[str]]) -> Row:
    pictures = [picture for picture, question in requested() if question == COUNT]
    actual = [answer.text for answer in there().answers(pictures, COUNT)]
    expected = right()[: len(pictures)]
    if actual != expected:
        raise WrongError(f"{actual}, expected {expected}")
    cells = {"type": dtype, "picture": f"{len(pictures)} at once", "question": COUNT}
    return Row(cells | {"answer": ", ".join(actual)}, TITLE)

"""The tutorial notebook runs from its first cell to its last, and says what is printed in it;
`python tests/examples/test_tutorial.py` writes its outputs anew.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "tutorial.ipynb"
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as notebooks have it


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell, as a notebook keeps them."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    out, value = io.StringIO(), None

    async def execute(code: Any) -> Any:
        result = eval(code, names)
        return await result if inspect.isawaitable(result) else result

    with redirect_stdout(out):
        asyncio.run(execute(compile(tree, "cell", "exec", AWAIT)))
        if last is not None:
            expression = ast.Expression(last.value)
            value = asyncio.run(execute(compile(expression, "cell", "eval", AWAIT)))
    outputs = []
    if out.getvalue():
        outputs.append(
            {"output_type": "stream", "name": "stdout", "text": out.getvalue().splitlines(True)}
        )
    if value is not None:
        data = {"text/plain": [repr(value)]}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": [value._repr_html_()]}
        outputs.append(
            {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
        )
    return outputs


def stated(outputs: list[dict[str, Any]]) -> list[str]:
    """What of them is the same on every machine: no times, no name of a device, no JPEG."""
    texts = [
        "".join(o["text"] if o["output_type"] == "stream" else next(iter(o["data"].values())))
        for o in outputs
    ]
    texts = [re.sub(r"<details>.*?</details>", "", text, flags=re.S) for text in texts]
    texts = [re.sub(r"base64,[^\"]+", "base64,", text) for text in texts]
    return [re.sub(r" on \w+, \w+", " on DEVICE", text) for text in texts]


def cells() -> Iterator[dict[str, Any]]:
    yield from (c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code")


def test_every_cell_says_what_is_printed_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells():
        source = "".join(cell["source"])
        assert stated(run(source, names)) == stated(cell["outputs"]), source


def write() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(EXAMPLES)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run("".join(cell["source"]), names)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write()

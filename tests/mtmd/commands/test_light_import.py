"""Importing mtmd and asking it for help costs nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mtmd

PICTURE = Path(__file__).parents[3] / "examples" / "one.png"
HEAVY = (
    "torch",
    "numpy",
    "PIL",
    "tokenizers",
    "safetensors",
    "jinja2",
    "huggingface_hub",
    "triton",
    "transformers",
)
CALL = """
import contextlib, io, json, sys
{code}
print(json.dumps([m for m in {heavy} if m in sys.modules]))
"""
HELP = """
from mtmd.cli import main
out = io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    for call in {calls}:
        try:
            sys.exit(main(call))
        except SystemExit as left:
            assert left.code == {code}, (call, left.code)
assert out.getvalue().count({reported!r}) == len({calls}), out.getvalue()
"""
CASES = {
    "import": "import mtmd; assert mtmd.__version__",
    "errors": "from mtmd import ImageError, ModelError, MtmdError, OptionError, PlacementError, "
    "PromptError",
    "help": HELP.format(
        calls=[["--help"], ["describe", "-h"], ["warmup", "--help"], ["help", "dump"]],
        code=0,
        reported="usage: mtmd",
    ),
    "options out of range": HELP.format(
        code=2,
        reported=", expected ",
        calls=[
            ["describe", "a.png", "--top-p", "2"],
            ["describe", "a.png", "--top-p", "-1"],
            ["describe", "a.png", "--temperature", "1e-6"],
            ["describe", "a.png", "--threads", "0"],
            ["warmup", "--dtype", "x"],
        ],
    ),
    "files that are not there": HELP.format(
        code=2,
        reported=", expected ",
        calls=[
            ["describe", "no such.png"],
            ["chat", "no such.png"],
            ["dump", "no such.png"],
            ["dump", "--compare", "no such.json"],
            ["compare", "demo", "demo", "--dtype-b", "bf16", "--image", "no such.png"],
            ["batch", "no such.png", "--out", "no such.jsonl"],
            ["describe", "--each", "no such.png"],
            ["describe", "tests", "-m", "no such"],
        ],
    ),
    "models that are not there": HELP.format(
        code=2,
        reported="expected a checkpoint folder",
        calls=[
            ["info", "no_such.gguf"],
            ["warmup", "-m", "no such"],
            ["compare", "demo", "no such"],
            ["info", "--mmproj", "no such"],
        ],
    ),
    "nothing": HELP.format(calls=[[]], code=0, reported="usage: mtmd"),
    "mistakes": HELP.format(
        calls=[["fly"], ["describe"], ["describe", "a.png", "--top-k", "x"], ["warmup", "--fast"]],
        code=2,
        reported="see 'mtmd",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_heavy_is_imported(case: str) -> None:
    code = CALL.format(code=CASES[case], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert done.stderr == ""


def test_an_answer_does_not_load_the_compiler() -> None:
    """torch's compiler and its symbolic shapes take longer to import than an answer of the demo
    model takes.
    """
    code = CALL.format(
        code=f"from mtmd import describe; describe({str(PICTURE)!r}, max_tokens=2, threads=1)",
        heavy=(
            "torch._dynamo",
            "torch._inductor",
            "torch.fx.experimental.symbolic_shapes",
            "sympy",
            "triton",
        ),
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


ALIASES = ("Event", "Images", "Message")  # of types


def test_every_public_name_is_there() -> None:
    assert sorted(mtmd.__all__) == mtmd.__all__ and set(mtmd.__all__) <= set(dir(mtmd))
    for name in mtmd.__all__:
        value = getattr(mtmd, name)
        assert name in ALIASES or value.__name__ == name
    errors = {getattr(mtmd, name) for name in mtmd.__all__ if name.endswith("Error")}
    assert len(errors) > 10 and all(issubclass(e, mtmd.MtmdError) for e in errors)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mtmd' has no attribute 'descrybe'"):
        _ = mtmd.descrybe  # type: ignore[attr-defined]

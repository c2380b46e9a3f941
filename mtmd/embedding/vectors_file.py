"""Vectors on disk: a NumPy file, .npy with the vectors alone, .npz with the names of the pictures
too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtmd.base.errors import OptionError
from mtmd.embedding.receipt import Vectors

SUFFIXES = (".npy", ".npz")
MAX_BYTES = 8 << 30
MAX_VALUES = 1 << 31


def check_path(path: Path) -> None:
    """Raises OptionError for a file that vectors cannot go to."""
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(
            f"--out {path}: expected a file ending in .npy (vectors) or .npz (vectors and names)"
        )
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--out {path}: found no folder {path.parent}; make it first")


def write(path: Path, names: list[str], vectors: Sequence[Vectors], width: int) -> None:
    """Whole or not at all. fp32 [N, D], and in .npz `names` [N]; of matrices, all of their vectors
    and how many are of each, `counts` [N]. Raises OptionError for matrices in .npy, which would not
    be told apart.
    """
    per_token = bool(len(vectors)) and vectors[0].ndim == 2
    joined = (
        np.concatenate(vectors) if per_token else np.array(vectors, np.float32).reshape(-1, width)
    )
    more = {"counts": np.array([len(one) for one in vectors])} if per_token else {}
    if per_token and path.suffix.lower() == ".npy":
        raise OptionError(
            f"--out {path}: the model gives a vector for each token; expected a file ending in .npz"
        )
    draft = path.with_name(f"{path.name}.part")
    with draft.open("wb") as file:
        if path.suffix.lower() == ".npy":
            np.save(file, joined, allow_pickle=False)
        else:
            named = np.array(names, np.str_)
            np.savez(file, allow_pickle=False, vectors=joined, names=named, **more)
    draft.replace(path)


def read(path: Path, width: int, per_token: bool = False) -> tuple[list[str], list[Vectors]]:
    """Names and vectors of an .npz file that `write` made, or matrices where there is one for each
    token. Raises OptionError for another, and for vectors of another width than the model's.
    """
    problem: object = "names and vectors are missing"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES >> 30} GiB")
        _check_headers(path)
        with np.load(path, allow_pickle=False) as stored:
            names, vectors = stored["names"], stored["vectors"]
            counts = stored["counts"] if "counts" in stored.files else None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
    else:
        each = np.ones(vectors.shape[:1], np.int64) if counts is None else counts
        sound = (
            names.dtype.kind == "U"
            and vectors.dtype == np.float32
            and vectors.ndim == 2
            and each.dtype == np.int64
            and names.shape == each.shape
            and bool((each > 0).all())
            and int(each.sum()) == len(vectors)
        )
        if sound and per_token is not (counts is not None):
            has = "a vector for each picture" if counts is None else "a vector for each token"
            problem = f"it has {has}, other than this model's"
        elif sound and vectors.shape[1] == width:
            parts = np.split(vectors, np.cumsum(each)[:-1]) if per_token else list(vectors)
            return [str(name) for name in names], parts
        elif sound:
            problem = f"its vectors have {vectors.shape[1]} numbers, this model's {width}"
    raise OptionError(
        f"--index {path}: {problem}; expected an .npz file that `mtmd embed --out` made with the "
        "same model"
    )


def _check_headers(path: Path) -> None:
    """Raises ValueError where arrays would be larger than the file: before anything is made for
    them.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                reader = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = reader(file)
            values = int(np.prod([int(n) for n in shape], dtype=object))
            if dtype.hasobject or values > MAX_VALUES or values * dtype.itemsize > MAX_BYTES:
                raise ValueError(f"an array of {values} values of type {dtype}")

"""Compiled programs in a folder, to be taken to a machine that has the card: a manifest, and for
each program a folder by the name that Triton's cache gives it.

    manifest.json                         what made it, for what, and each file's size and digest
    3f9c.../whole_kernel.json         what Triton notes of a program
    3f9c.../whole_kernel.cubin        or .hsaco: its machine code

Files are checked against the manifest, then put into Triton's cache, where launches look. Digests
find what was damaged or exchanged by mistake, and are no signature: machine code runs on the GPU as
its writer meant it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_manager, triton_key

from mtmd.base.errors import OptionError
from mtmd.base.files import open_regular
from mtmd.kernels.gpu.compile import parse_target

MANIFEST, FORMAT = "manifest.json", 2
TEMPORARY = ".part"  # in the folder: what is being written
BINARIES = (".cubin", ".hsaco")
MANIFEST_BYTES_MAX, FILE_BYTES_MAX, PROGRAMS_MAX = 32 << 20, 64 << 20, 20_000
BYTES_MAX = (
    1 << 30
)  # of all programs, which are held while they are checked; a model's are a few MiB
MADE_WITH = ("triton", "triton_build", "sources", "tools", "variables")
KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_]{1,150}\.(json|cubin|hsaco)", re.ASCII)


@dataclass(frozen=True)
class Saved:
    """Describes what a folder holds, checked: files by their name, by program."""

    model: str
    programs: dict[str, dict[str, bytes]]


def made_with(target: str) -> dict[str, str]:
    """Return what compiled programs for a target depend on: all that Triton's own key for them has.

    Raises OptionError where Triton does not find its tools for the target.
    """
    build = hashlib.sha256(triton_key().encode()).hexdigest()
    try:
        tools = make_backend(parse_target(target)).hash()
    except Exception as error:  # backends' own errors share no base class
        raise OptionError(f"kernels for {target}: Triton's tools are not here ({error})") from error
    return {
        "triton": triton.__version__,
        "triton_build": build,
        "sources": _sources(),
        "tools": _digest(tools.encode()),
        "variables": json.dumps(get_cache_invalidating_env_vars(), sort_keys=True),
    }


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    """A digest of the kernels' own text."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix().encode()
        digest.update(name + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def check_folder(folder: Path) -> None:
    """Check that programs may be saved there. Raises OptionError for a folder with anything else in
    it, unless programs were saved there before.
    """
    try:
        there = list(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise OptionError(f"save {folder}: cannot be read ({error.strerror})") from error
    others = [one.name for one in there if one.name != TEMPORARY and not KEY.fullmatch(one.name)]
    if others and not (folder / MANIFEST).is_file():
        raise OptionError(
            f"save {folder}: found {others[0]} and no {MANIFEST}, expected an empty folder or one "
            "that kernels were saved to before"
        )


def make_folder(folder: Path) -> None:
    """`check_folder`, and that it can be written to, before anything is compiled for it. Raises
    OptionError.
    """
    check_folder(folder)
    with _writing(folder):
        pass


def save(
    folder: Path, target: str, model: str, version: str, compiled: Sequence[Any]
) -> dict[str, int]:
    """Write programs (Triton's compiled kernels) to a folder; those of an earlier time go. `model`
    and `version`, of mtmd, are noted. -> how many `programs` and `bytes`.

    Raises OptionError where it cannot be written.
    """
    check_folder(folder)
    entries, total = {}, 0
    with _writing(folder) as moved:
        for one in compiled:
            files = {}
            for name, path in one.metadata_group.items():
                if NAME.fullmatch(name):
                    content = Path(path).read_bytes()
                    (moved / one.hash).mkdir(exist_ok=True)
                    (moved / one.hash / name).write_bytes(content)
                    files[name] = {"bytes": len(content), "sha256": _digest(content)}
                    total += len(content)
            entries[one.hash] = {"kernel": one.name, "files": files}
        head = {"format": FORMAT, "target": target, "model": model, "mtmd": version}
        text = json.dumps({**head, **made_with(target), "programs": entries}, indent=1)
        (moved / MANIFEST).write_text(text + "\n")
        for key, entry in entries.items():
            if not _holds(folder / key, entry["files"]):
                if (folder / key).exists():
                    (folder / key).rename(moved / f"{key}.before")
                (moved / key).rename(folder / key)
        (moved / MANIFEST).replace(folder / MANIFEST)  # up to here the programs of before are used
        for old in folder.iterdir():
            if KEY.fullmatch(old.name) and old.name not in entries:
                shutil.rmtree(old)
    return {"programs": len(entries), "bytes": total}


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """A folder for what is being written, in the one that is to have it, and gone afterwards."""
    moved = folder / TEMPORARY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(moved, ignore_errors=True)  # of one that was killed
        moved.mkdir()
        yield moved
    except OSError as error:
        raise OptionError(f"save {folder}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(moved, ignore_errors=True)


def _holds(folder: Path, files: dict[str, dict[str, Any]]) -> bool:
    try:
        return all(
            _digest((folder / name).read_bytes()) == facts["sha256"]
            for name, facts in files.items()
        )
    except OSError:
        return False


def read_saved(folder: Path, target: str) -> Saved:
    """Return what was saved for such a device, every file compared with the manifest.

    Raises OptionError for what is missing, damaged, or made for another target, by another version
    of Triton or of its tools, with other settings of theirs, or from other kernels.
    """
    manifest = _manifest(folder)
    if manifest["target"] != target:
        raise OptionError(
            f"kernels {folder}: made for {manifest['target']!r:.40}, found the device {target}; "
            f"make them by 'mtmd warmup --target {target} --save DIR'"
        )
    here = made_with(target)
    if manifest["triton"] != here["triton"]:
        raise OptionError(
            f"kernels {folder}: made by Triton {manifest['triton']!r:.40}, found "
            f"{here['triton']} here; make them with the version that runs them"
        )
    if manifest["triton_build"] != here["triton_build"]:
        raise OptionError(
            f"kernels {folder}: made by another build of Triton {here['triton']} (processor or "
            "Python differ); make them with the one that runs them"
        )
    if manifest["sources"] != here["sources"]:
        raise OptionError(
            f"kernels {folder}: made from the kernels of another mtmd, {manifest['mtmd']!r:.40}; "
            "make them anew"
        )
    if manifest["variables"] != here["variables"]:
        raise OptionError(
            f"kernels {folder}: made with Triton's variables {manifest['variables']!r:.200}, found "
            f"{here['variables']:.200} here; set the same"
        )
    if manifest["tools"] != here["tools"]:
        raise OptionError(
            f"kernels {folder}: made by another version of the tools that Triton calls for "
            f"{target} (NVIDIA's ptxas, TRITON_PTXAS_PATH); make them with the one that is here"
        )
    if not manifest["programs"]:
        raise OptionError(f"kernels {folder}: holds no programs; make them anew")
    left = BYTES_MAX
    for files in manifest["programs"].values():
        left -= sum(_size(folder, name, facts) for name, facts in files.items())
    if left < 0:
        raise OptionError(
            f"kernels {folder}: {(BYTES_MAX - left) >> 20} MiB of programs, expected at most "
            f"{BYTES_MAX >> 20}; save fewer models' to one folder"
        )
    programs = {
        key: {name: _file(folder, key, name, facts) for name, facts in files.items()}
        for key, files in manifest["programs"].items()
    }
    for key, contents in programs.items():
        _check_program(folder, key, contents)
    return Saved(manifest["model"], programs)


def install(saved: Saved) -> int:
    """Put programs into Triton's cache, as far as they are not there. -> how many were not.

    Raises OptionError where the cache cannot be written.
    """
    new = 0
    for key, files in saved.programs.items():
        manager = get_cache_manager(key)
        metadata = next(name for name in files if name.endswith(".json"))
        if _is_there(manager.get_group(metadata), files):
            continue
        try:
            paths = {name: manager.put(content, name) for name, content in files.items()}
            manager.put_group(metadata, paths)
        except OSError as error:
            raise OptionError(
                f"kernels: Triton's cache {triton.knobs.cache.dir} cannot be written "
                f"({error.strerror}); set TRITON_CACHE_DIR to a folder that can"
            ) from error
        new += 1
    return new


def _is_there(group: dict[str, str] | None, files: dict[str, bytes]) -> bool:
    if group is None:
        return False
    try:
        return all(Path(group[name]).read_bytes() == files[name] for name in files)
    except (KeyError, OSError):
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    """Read the fields of the manifest, each of the type and form that it has to have; `programs`
    are files by key.
    """
    content = _read(folder / MANIFEST, MANIFEST_BYTES_MAX, folder)
    try:
        result = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"kernels {folder}: {MANIFEST} is not JSON") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise OptionError(
            f"kernels {folder}: {MANIFEST} is not of format {FORMAT}, which this mtmd reads; make "
            "them anew by 'mtmd warmup --target GPU --save DIR'"
        )
    texts = ("target", "model", "mtmd", *MADE_WITH)
    programs = result.get("programs")
    if not all(isinstance(result.get(name), str) for name in texts) or not (
        isinstance(programs, dict) and len(programs) <= PROGRAMS_MAX
    ):
        raise OptionError(f"kernels {folder}: {MANIFEST} lacks what it has to say")
    checked = {}
    for key, entry in programs.items():
        files = entry.get("files") if isinstance(entry, dict) else None
        if not KEY.fullmatch(key) or not isinstance(files, dict):
            raise OptionError(f"kernels {folder}: {MANIFEST} has no program {key!r:.80}")
        kinds = sorted(Path(name).suffix for name in files if NAME.fullmatch(name))
        if len(files) != 2 or kinds not in ([b, ".json"] for b in BINARIES):
            raise OptionError(
                f"kernels {folder}: program {key:.16} has the files {sorted(files)!r:.120}, "
                "expected one of machine code and one .json"
            )
        checked[key] = files
    return {**{name: result[name] for name in texts}, "programs": checked}


def _size(folder: Path, name: str, facts: Any) -> int:
    size = facts.get("bytes") if isinstance(facts, dict) else None
    if type(size) is not int or not 0 < size <= FILE_BYTES_MAX:
        raise OptionError(f"kernels {folder}: {name} of {size!r:.20} bytes, which no program has")
    return size


def _file(folder: Path, key: str, name: str, facts: Any) -> bytes:
    size, digest = _size(folder, name, facts), facts.get("sha256")
    content = _read(folder / key / name, size, folder)
    if len(content) != size or _digest(content) != digest:
        raise OptionError(
            f"kernels {folder}: {key:.16}/{name} is not what was saved (size or digest differ); "
            "copy the folder again"
        )
    return content


def _read(path: Path, maximum: int, folder: Path) -> bytes:
    try:
        with open_regular(path) as file:
            content = file.read(maximum + 1)
    except OSError as error:
        raise OptionError(
            f"kernels {folder}: {path.relative_to(folder)} cannot be read ({error.strerror}); "
            "expected a folder written by 'mtmd warmup --target GPU --save DIR'"
        ) from error
    if len(content) > maximum:
        raise OptionError(
            f"kernels {folder}: {path.relative_to(folder)} has more than {maximum} bytes"
        )
    return content


def _check_program(folder: Path, key: str, files: dict[str, bytes]) -> None:
    """Check whether what Triton would read of a program is of this one."""
    text = next(content for name, content in files.items() if name.endswith(".json"))
    try:
        noted = json.loads(text)
        same = noted["hash"] == key and noted["triton_version"] == triton.__version__
    except (ValueError, KeyError, TypeError, RecursionError):
        same = False
    if not same:
        raise OptionError(f"kernels {folder}: {key:.16} is noted as another program")

"""The control groups that this process is in (cgroups(7)), which limit what it may have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def groups(proc: Path, cgroup: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that `controller` may limit this process by, from the inner
    to the outer: a limit further up holds too.
    """
    for line in text_of(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            version, roots = 2, [cgroup]
        elif controller in controllers.split(","):
            # Those that share a hierarchy lie in one folder, which mostly has links of their names.
            version, roots = 1, [cgroup / controller, cgroup / controllers]
        else:
            continue
        root = next((folder for folder in roots if folder.is_dir()), roots[0])
        inner = Path(path.lstrip("/"))
        # Inside a container, "/" is its own.
        for part in (inner, *inner.parents):
            yield version, root / part


def text_of(file: Path) -> str:
    """ "" where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""

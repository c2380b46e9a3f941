"""Real clients, unchanged, against the server: what each does first, on the demo model, and, where
that knows too little, on a stand-in that writes what is asked. Prints the table of docs/clients.md.

    make clients                    # all, in environments of their own below .venv-clients
    CLIENTS="openai ollama" make clients

Ends with 1 where a cell works on neither.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "support")]

from dual_encoders import clip  # noqa: E402
from serving import running  # noqa: E402
from stand_in import StandIn  # noqa: E402

from mtmd import Service, load, load_embedder  # noqa: E402
from mtmd.embedding.service import RetrievalService  # noqa: E402
from mtmd.web.settings import ServerSettings  # noqa: E402
from mtmd.web.small_apps.retrieval_app import create_retrieval_app  # noqa: E402

COLUMNS = ("image", "stream", "structured", "tools", "n", "responses", "files", "embeddings")
LIMIT_S = 300  # for all cells of a client
WORKS, STAND_IN = "works", "stand-in"


@contextmanager
def served() -> Iterator[list[str]]:
    """Addresses of the demo model, the stand-in and a dual encoder."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny clip"
        clip(folder)
        vectors = RetrievalService(load_embedder(folder, threads=1))
        settings = ServerSettings(rate_limit=0)
        servers = (
            running(Service(load(threads=1, parallel=8))),
            running(StandIn()),
            running(vectors, create_retrieval_app(vectors, settings)),
        )
        yield [stack.enter_context(server).url for server in servers]


def clients(environment: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Name, command and folder of each that is installed."""
    for command, folder in (
        ([str(environment / "bin" / "python"), str(HERE / "python_clients.py")], HERE),
        (["node", str(HERE / "node_clients.mjs")], environment / "node"),
    ):
        try:
            listed = subprocess.run(
                [*command, "--list"], cwd=folder, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"left out, as it does not start: {' '.join(command)} ({error})", file=sys.stderr)
            continue
        for name in listed.stdout.split():
            yield name, command, folder


def cells(command: list[str], name: str, folder: Path, urls: list[str]) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            [*command, name, *urls], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
        )
        out, why = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        out, why = (late.stdout or b"").decode(), f"longer than {LIMIT_S} s"
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"client"')]
    if not found:
        found = [{"client": name, "cell": "image", "demo": why[-300:], "stand_in": why[-300:]}]
    return found


def outcome(cell: dict[str, Any]) -> str:
    if not cell["demo"]:
        return WORKS
    return STAND_IN if not cell["stand_in"] else "FAILS"


def table(found: list[dict[str, Any]]) -> str:
    by_client: dict[str, dict[str, str]] = {}
    for cell in found:
        by_client.setdefault(cell["client"], {})[cell["cell"]] = outcome(cell)
    rows = [("client", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    rows += [(name, *(done.get(c, "–") for c in COLUMNS)) for name, done in by_client.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, help="of the clients: bin/python, node/")
    parser.add_argument("only", nargs="*", help="names of clients (default: all)")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    with served() as urls:
        for name, command, folder in clients(args.environment.absolute()):
            if not args.only or name in args.only:
                made = cells(command, name, folder, urls)
                told = ", ".join(f"{cell['cell']} {outcome(cell)}" for cell in made)
                print(f"{made[0]['client']}: {told}", file=sys.stderr, flush=True)
                found += made
    failed = [cell for cell in found if outcome(cell) == "FAILS"]
    print(table(found))
    for cell in found:
        if outcome(cell) != WORKS:
            print(f"\n{cell['client']}, {cell['cell']}: {outcome(cell)}")
            print(f"  demo model: {cell['demo']}")
            if cell["stand_in"]:
                print(f"  stand-in: {cell['stand_in']}")
    works = sum(outcome(cell) == WORKS for cell in found)
    only = len(found) - works - len(failed)
    print(f"\n{len(found)} cells: {works} work, {only} on the stand-in, {len(failed)} fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

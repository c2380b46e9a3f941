"""A real server under a few hundred attempts of each kind, and one account of them. Nothing here is
decided by how long it took; `make hostile` goes on for longer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from attack import Account, attack, chance, examples
from attempts import Attempt, Generator
from audio_cases import gemma4_unified
from damaged_audio import audio_attempt
from damaged_pictures import picture_attempt
from damaged_videos import video_attempt
from grammars import constraint_attempt
from http_shapes import KINDS, http_shape
from routes import Route, routes
from run import MEMORY_MIB, grown, judged
from served import ATTACKER, Served, Watched, served
from slow_clients import attack_slowly

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
COUNTS: dict[Generator, int] = {
    http_shape: 400,
    picture_attempt: 200,
    video_attempt: 80,
    audio_attempt: 80,
    constraint_attempt: 200,
}
SLOW = 200


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--no-warmup", "--threads", "1") as made:
        yield made
    assert not made.problems, made.problems


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One whose model takes audio, which is decoded then."""
    folder = tmp_path_factory.mktemp("hearing")
    gemma4_unified(folder)
    with served("--no-warmup", "--threads", "1", "-m", str(folder)) as made:
        yield made
    assert not made.problems, made.problems


@pytest.fixture(scope="module", autouse=True)
def watched(server: Served) -> Iterator[None]:
    watcher = Watched(server, chats=1)
    watcher.begin("attacked")
    try:
        yield
        result = watcher.end()["attacked"]
    finally:
        watcher.close()
    assert not judged("attacked", result, MEMORY_MIB, busy=True)
    assert result["chats"].get("200"), result
    server.settled_files()


@pytest.mark.parametrize("generator", COUNTS, ids=lambda g: g.__name__)
def test_all_are_answered_and_none_with_an_error_of_ours(
    generator: Generator, server: Served, request: pytest.FixtureRequest
) -> None:
    if generator is audio_attempt:
        server = request.getfixturevalue("hearing")
    where, count = (server.host, server.port), COUNTS[generator]
    result = attack(where, generator, ATTACKER, 1, count=count, heavy=False)
    assert not result.problems, result.problems
    assert count * 0.95 < result.count <= count
    assert {"200", "400"} <= set(result.statuses), result.statuses


def test_slow_clients_keep_nobody_from_being_answered(server: Served) -> None:
    where = (server.host, server.port)
    result = attack_slowly(where, ATTACKER, 1, count=SLOW, seconds=2, to_the_end=False)
    assert result.count >= SLOW and not result.problems, result.problems
    with urlopen(f"{server.url}/health", timeout=120) as health:
        assert health.status == 200


@pytest.mark.parametrize("generator", COUNTS, ids=lambda g: g.__name__)
def test_the_same_seed_makes_the_same(generator: Generator) -> None:
    first, again = (list(examples(generator, 5, 30)) for _ in range(2))
    assert first == again != list(examples(generator, 6, 30))


def test_every_shape_is_made() -> None:
    assert len({a.what for a in examples(http_shape, 1, 400)}) >= len(KINDS)


def test_every_route_is_attacked() -> None:
    """Those that are registered, whoever brings them."""
    made = (KINDS["any route"](chance("any route", 1, n), "key").data for n in range(1500))
    lines = [data.decode("latin-1").split(" ", 2)[:2] for data in made]

    def times(route: Route) -> int:
        rule = re.compile(re.sub(r"<[^>]+>", ".+", route.rule))
        return sum(m == route.method and rule.fullmatch(path) is not None for m, path in lines)

    assert {r.rule: r.method for r in routes() if not times(r)} == {}
    assert len(routes()) > 100


@pytest.mark.parametrize(
    "status, whole, data, wrong",
    [
        ("200", True, b"", False),
        ("503", True, b"", False),
        ("500", True, b"", True),
        ("502", False, b"", True),
        ("closed", True, b"", True),
        ("closed", False, b"", False),
        ("unanswered", False, b"", True),
        ("400", True, b'File "web/app.py"', True),
    ],
)
def test_what_the_account_takes_for_a_problem(
    status: str, whole: bool, data: bytes, wrong: bool
) -> None:
    account = Account()
    account.add(Attempt("x", b"", whole), "1", status, 0.1, data)
    assert bool(account.problems) is wrong and account.count == 1


def test_memory_that_is_kept_is_told() -> None:
    assert not grown([400, 900, 500, 600, 590, 2000, 600, 610, 590, 600] * 3)
    assert not grown([1, 2, 3])
    assert len(grown(list(range(400, 700, 10)))) == 1


def test_what_the_watcher_sees_is_judged() -> None:
    well = {
        "health": {"200": 9},
        "health_ms": {"max": 30.0},
        "over_250_ms": 0,
        "peak_memory_mib": 900,
        "chats": {"200": 4, "429": 1},
    }
    assert not judged("x", well, MEMORY_MIB, busy=False)
    for wrong in (
        {"health": {"200": 9, "unanswered": 1}},
        {"over_250_ms": 1},
        {"peak_memory_mib": MEMORY_MIB + 1},
        {"chats": {"cut off": 1}},
    ):
        assert len(judged("x", well | wrong, MEMORY_MIB, busy=False)) == 1
    assert not judged("x", well | {"over_250_ms": 1}, MEMORY_MIB, busy=True)

"""Actors of a Ray cluster, with Ray left out: what calls give, and how actors end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtmd.base.errors import DeviceError
from mtmd.cluster import actors as module
from mtmd.cluster.actors import Actors, Ended, Result, list_on_cluster, may_be_work, reason
from mtmd.cluster.connect import PoolSize
from mtmd.cluster.manifest import Item, Unit
from mtmd.cluster.schedule import Task
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.worker import Job, Written


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause: Any = None


class ActorDiedError(RayError):
    preempted = False


class ActorUnavailableError(RayError):
    pass


class GetTimeoutError(RayError):
    pass


class Ray:
    """Calls are numbers; `results` of those that are over."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        ActorUnavailableError=ActorUnavailableError,
        GetTimeoutError=GetTimeoutError,
    )

    def __init__(self) -> None:
        self.made: list[tuple[int, str]] = []
        self.results: dict[int, Any] = {}
        self.requested: list[dict[str, Any]] = []
        self.killed: list[int] = []
        self.becomes: list[Any] = []
        """What actors that are asked whether they live give."""

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, **requested: Any) -> Any:
        self.requested.append(requested)
        return SimpleNamespace(remote=lambda *_: _Actor(self, len(self.requested) - 1))

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": 4.0, "memory": 1000.0}}]

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], Any]:
        assert num_returns <= len(calls) and timeout >= 0
        return [call for call in calls if call in self.results][:num_returns], []

    def get(self, call: int, timeout: float = 0) -> Any:
        if timeout and self.made[call][1] == "__ray_ready__":
            self.results[call] = self.becomes.pop(0)
        if isinstance(self.results[call], Exception):
            raise self.results[call]
        return self.results[call]

    def kill(self, actor: _Actor) -> None:
        self.killed.append(actor._number)


class _Actor:
    def __init__(self, ray: Ray, number: int):
        self._ray, self._number = ray, number

    def __getattr__(self, method: str) -> Any:
        def remote(*_: Any) -> int:
            self._ray.made.append((self._number, method))
            return len(self._ray.made) - 1

        return SimpleNamespace(remote=remote)


UNIT = Unit(3, (Item("a", "a", "file", "/a"), Item("b", "b", "file", "/b")))
DIED = ActorDiedError("The actor died.\n\tactor_id: 77\nIts worker process has died. Node id 5")
NODE = ActorDiedError("The actor died.\nThe actor died because its node has died. Node Id: 5")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    return Ray()


@pytest.fixture
def actors(ray: Ray) -> Actors:
    return Actors(ray, Job("/o.jsonl", ".jsonl", "?"), PoolSize(2, 3, 1, 3))


def test_what_an_actor_takes_and_gives(ray: Ray, actors: Actors) -> None:
    assert [actors.start(0), actors.start(500), actors.start(5000)] == [0, 1, 2]
    assert [requested.get("memory") for requested in ray.requested] == [None, 500, 1000]
    assert all(
        (requested["num_cpus"], requested["num_gpus"]) == (3, 1) for requested in ray.requested
    )
    assert actors.wait(0) == []
    ray.results |= {2: "host", 3: "loaded"}
    assert actors.wait(0) == [
        Result(1, None, "host"),
        Result(1, None, "loaded"),  # type: ignore[arg-type]
    ]
    for task in (Task(3), Task(3, 1)):
        actors.give(1, task, UNIT)
    assert [name for _, name in ray.made[6:]] == ["run", "answer"]
    ray.results[6] = Written(2, 0)
    assert actors.wait(0) == [Result(1, Task(3), Written(2, 0))]


@pytest.mark.parametrize(("error", "blame"), ((DIED, True), (NODE, False)))
def test_an_actor_that_ends_is_told_of_once(
    ray: Ray, actors: Actors, error: Exception, blame: bool
) -> None:
    actor = actors.start(0)
    actors.give(actor, Task(3), UNIT)
    actors.give(actor, Task(4), UNIT)
    ray.results = {1: "loaded", 2: error, 3: error}
    reported, ended = actors.wait(0)
    assert reported == Result(actor, None, "loaded")  # type: ignore[arg-type]
    assert isinstance(ended, Ended) and (ended.actor, ended.blame) == (actor, blame)
    assert ended.reason.startswith("The actor died. ") and "actor_id" not in ended.reason
    assert ray.killed == [actor]


def until_something(actors: Actors) -> list[Result | Ended]:
    while not (events := actors.wait(0)):
        pass
    return events


@pytest.mark.parametrize(
    ("becomes", "blame"),
    ((DIED, True), (NODE, False), ("it lives", False), (GetTimeoutError(), False)),
)
def test_an_actor_that_does_not_answer_is_asked_why(
    ray: Ray, actors: Actors, becomes: Any, blame: bool
) -> None:
    actor = actors.start(0)
    actors.give(actor, Task(3), UNIT)
    ray.results = {2: ActorUnavailableError("Socket closed")}
    ray.becomes = [ActorUnavailableError("Socket closed"), becomes]
    assert actors.wait(0) == []
    actors.give(actor, Task(4), UNIT)
    (ended,) = until_something(actors)
    assert isinstance(ended, Ended) and ended.blame == blame and ray.killed == [actor]
    assert [name for _, name in ray.made[3:]] == ["__ray_ready__"] * 2


def test_it_is_not_asked_for_ever(
    ray: Ray, actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DOUBT_S", 0.0)
    actor = actors.start(0)
    ray.results = {1: ActorUnavailableError("Socket closed")}
    assert actors.wait(0) == []
    assert until_something(actors) == [Ended(actor, "it could not be reached", blame=False)]
    assert ray.killed == [actor]


def test_a_listing_whose_process_ends_is_told(ray: Ray) -> None:
    ray.remote = lambda _: SimpleNamespace(remote=lambda *_: 0)  # type: ignore[assignment]
    ray.results = {0: RayError("Task was killed due to the node running low on memory.")}
    shards = [("https://host/a.tar?sig=5ec2e7", "")]
    with pytest.raises(
        DeviceError, match=r"^https://host/a.tar: cannot be listed, .*low on memory"
    ):
        next(list_on_cluster(ray, shards, Columns()))


def test_what_an_actor_raised_is_its_own() -> None:
    raised = RayTaskError("a traceback that names a node: its node has died")
    raised.cause = ValueError("no such thing")
    assert may_be_work(raised) and reason(raised) == "ValueError: no such thing"
    failed = ActorDiedError("The actor died\n  File x\nModuleNotFoundError: No module named 'mtmd'")
    failed.actor_init_failed = True  # type: ignore[attr-defined]
    assert reason(failed) == "ModuleNotFoundError: No module named 'mtmd'"

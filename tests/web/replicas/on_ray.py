"""`mtmd serve --ray local`, with Ray: two replicas, of which one is killed while 64 clients wait;
where requests of one picture go; how it ends. `make ray` runs it: Ray takes longer to install and
to start than the other tests.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

LONG_S = 180.0
KEY = "k" * 20
QUESTION = "How many shapes are there?"
WORDS = ("Zero.", "One.", "Two.", "Three.", "Four.")


@dataclass
class Statement:
    """`pieces`: bytes of the body that came; `whole`: whether its end was told."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def replica(self) -> str:
        return self.headers.get("x-mtmd-replica", "")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Running:
    """The command. Its output goes to `reported`; `key` is sent with every request."""

    key = ""

    def __init__(
        self,
        reported: Path,
        *words: str,
        ray: str = "local",
        port: int = 0,
        replicas: str = "2",
        program: tuple[str, ...] = ("-m", "mtmd.cli"),
    ) -> None:
        command = [sys.executable, *program, "serve", "--ray", ray, "--port", str(port)]
        self.reported = reported
        with reported.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "--replicas", replicas, "--threads", "1", *words],
                stdout=file,
                stderr=file,
            )
        result = self.wait_for(lambda: re.search(r"serving at http://127\S+?:(\d+),", self.text))
        self.port = int(result[1])
        minimum = int(replicas.partition(":")[0])
        self.wait_for(lambda: f"{minimum} replica{'s' * (minimum > 1)} ready" in self.text)

    @classmethod
    def there(cls, process: subprocess.Popen[bytes], reported: Path, port: int) -> Running:
        """What another command has started."""
        server = cls.__new__(cls)
        server.process, server.reported, server.port = process, reported, port
        return server

    @property
    def text(self) -> str:
        return self.reported.read_text()

    def is_ready(self) -> bool:
        try:
            return self.ask("GET", "/ready").status == 200
        except OSError:
            return False

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + LONG_S
        while not (result := condition()):
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.05)
        return result

    def ask(self, method: str, path: str, body: Any = None, began: Any = None) -> Statement:
        """`began` is set once a part of the body has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
            connection.request(
                method, path, json.dumps(body) if body is not None else None, headers
            )
            response = connection.getresponse()
            pieces, whole = [], True
            try:
                while piece := response.read1(1 << 16):
                    pieces.append(piece)
                    if began is not None:
                        began.set()
            except (http.client.HTTPException, OSError):
                whole = False
            result = {name.lower(): value for name, value in response.getheaders()}
            return Statement(response.status, result, b"".join(pieces), whole)
        finally:
            connection.close()

    def metric(self, name: str) -> dict[str, float]:
        """By replica."""
        text = self.ask("GET", "/metrics").body.decode()
        return {
            sample.labels["replica"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def processes(self, title: str) -> list[int]:
        """Of this command's Ray, by what they call themselves."""
        return [pid for pid in descendants(self.process.pid) if title_of(pid).startswith(title)]


@contextmanager
def running(reported: Path, *words: str, **chosen: Any) -> Iterator[Running]:
    server = Running(reported, *words, **chosen)
    started = descendants(server.process.pid)
    try:
        yield server
    finally:
        started |= descendants(server.process.pid)
        end_all(server.process, started)


def end_all(process: subprocess.Popen[bytes], started: set[int]) -> None:
    """The process, and those below it, which end with it."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end = time.monotonic() + 60
    while left := [pid for pid in started if is_there(pid)]:
        if time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"left behind: {[title_of(pid) for pid in left]}")
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue
        below.setdefault(int(tail.split()[1]), []).append(int(head.split()[0]))
    result, waiting = set[int](), [pid]
    while waiting:
        children = below.get(waiting.pop(), [])
        result.update(children)
        waiting += children
    return result


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def requesting(url: str, text: str = QUESTION, **more: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.fixture(scope="module")
def pictures() -> list[tuple[str, str]]:
    """Pictures as data URLs, and how many shapes are in each."""
    from world import draw

    rng, result = random.Random(11), []
    for _ in range(16):
        image, facts = draw(rng)
        file = io.BytesIO()
        image.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        result.append((url, WORDS[len(facts.things)]))
    return result


def cache_hits(server: Running, pictures: list[tuple[str, str]], times: int) -> tuple[float, int]:
    """Of all requests after the first of each picture, the part that found it encoded; and how
    many replicas answered.
    """
    order = list(pictures) * times
    random.Random(3).shuffle(order)
    seen, later, hits, replicas = set[str](), 0, 0, set[str]()
    with ThreadPoolExecutor(4) as pool:
        requested = [(url, word, pool.submit(server.ask, "POST", "/v1/chat/completions", requesting(url)))
                 for url, word in order]  # fmt: skip
        for url, word, future in requested:
            stated = future.result()
            assert stated.status == 200 and stated.whole, stated.body
            assert stated.json["choices"][0]["message"]["content"] == word
            replicas.add(stated.replica)
            image = stated.json["usage"]["mtmd_receipt"]["images"][0]
            later += url in seen
            hits += bool(image["cached"]) and url in seen
            seen.add(url)
    return hits / later, len(replicas)


def test_a_replica_is_killed_while_64_clients_wait(
    pictures: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Half of the clients read streams, half wait for the whole answer. Only streams of which
    something has come may break, and only those of the replica that was killed.
    """
    with running(tmp_path / "told") as server:
        hits, replicas = cache_hits(server, pictures, 5)
        print(f"with affinity: {hits:.0%} of later requests found their picture encoded")
        assert hits > 0.9 and replicas == 2

        began = [threading.Event() for _ in range(64)]
        long = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}

        def ask(number: int) -> Statement:
            body = requesting(pictures[number % 16][0], f"Question {number}", **long)
            body["stream"] = number % 2 == 0
            return server.ask("POST", "/v1/chat/completions", body, began[number])

        with ThreadPoolExecutor(64) as pool:
            futures = [pool.submit(ask, number) for number in range(64)]
            server.wait_for(lambda: sum(event.is_set() for event in began) >= 12)
            assert min(server.metric("mtmd_running").values()) > 0
            begun = {number for number in range(64) if began[number].is_set()}
            os.kill(server.processes("ray::ServeReplica:mtmd:Replica")[0], signal.SIGKILL)
            stated = [future.result() for future in futures]

        broken = [number for number in range(64) if not stated[number].whole]
        print(f"{len(begun)} streams had begun, {len(broken)} broke")
        assert {one.status for one in stated} == {200}, [
            one.body for one in stated if one.status > 200
        ]
        assert all(number % 2 == 0 and stated[number].body for number in broken)
        assert len({stated[number].replica for number in broken}) == 1, "those of the one killed"
        for number in set(range(64)) - set(broken):
            if number % 2:
                assert stated[number].json["usage"]["completion_tokens"] > 1
            else:
                assert stated[number].body.endswith(b"data: [DONE]\n\n")
        assert broken, "streams were being read from it"
        lost = stated[broken[0]].replica
        server.wait_for(lambda: len(set(server.metric("mtmd_replica_up")) - {lost}) == 2)

        state(server)
        ends_what_it_has_begun(server, pictures[0][0])


def state(server: Running) -> None:
    """What one replica keeps is found there, whoever answers what comes between."""
    first = server.ask("POST", "/v1/responses", {"input": "What is a circle?"})
    replica = first.replica
    assert first.status == 200 and f"-{replica}-" in first.json["id"]
    for number in range(4):
        server.ask("POST", "/v1/responses", {"input": f"Something else {number}", "store": False})
        further = {"input": "And a square?", "previous_response_id": first.json["id"]}
        stated = server.ask("POST", "/v1/responses", further)
        assert stated.status == 200 and stated.replica == replica, stated.body
    got = server.ask("GET", f"/v1/responses/{first.json['id']}")
    assert got.status == 200 and got.json["id"] == first.json["id"]
    gone = re.sub("resp_req-[^-]+", "resp_req-gone", first.json["id"])
    refused = server.ask("POST", "/v1/responses", {"input": "?", "previous_response_id": gone})
    assert refused.json["error"]["code"] == "previous_response_not_found"
    assert server.ask("GET", "/api/conversations").status == 404


def left(server: Running, url: str) -> None:
    """A client that leaves ends its answer, on the replica too. The demo model writes 1,500 tokens
    in a third of a second, so the answer may be over before anyone could learn that its client has
    left: log-probabilities make it longer, and another client leaves if that was not enough.
    """
    body = json.dumps(
        requesting(
            url, stream=True, max_tokens=1500, ignore_eos=True, logprobs=True, top_logprobs=20
        )
    )
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    for _ in range(10):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONG_S)
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200 and response.read1(1 << 16)
        response.close()
        connection.close()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if sum(server.metric("mtmd_cancelled_total").values()) == 1:
                return
            time.sleep(0.05)
    raise AssertionError("ten clients left, and no replica counted one")


def ends_what_it_has_begun(server: Running, url: str) -> None:
    """Asked to end, it writes answers first."""
    began = threading.Event()
    body = requesting(url, stream=True, max_tokens=600, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.ask, "POST", "/v1/chat/completions", body, began)
        assert began.wait(LONG_S)
        server.process.terminate()
        stated = future.result()
    assert stated.whole and stated.body.endswith(b"data: [DONE]\n\n")
    assert server.process.wait(LONG_S) == 0
    assert server.text.endswith("stopped\n")


QUICKER = """
import sys
from mtmd.web.replicas import replica_slots
replica_slots.MORE_AFTER_S, replica_slots.FEWER_AFTER_S, replica_slots.LOOKED_BACK_S = 1.0, 4.0, 3.0
from mtmd.cli import main
sys.exit(main())
"""


def test_more_replicas_come_when_they_are_wanted_and_go_when_they_are_not(
    pictures: list[tuple[str, str]], tmp_path: Path
) -> None:
    words = ("--parallel", "2", "--no-affinity")
    quicker = {"replicas": "1:2", "program": ("-c", QUICKER)}
    with running(tmp_path / "told", *words, **quicker) as server:
        done, stated = threading.Event(), list[Statement]()

        def ask() -> None:
            while not done.is_set():
                body = requesting(pictures[0][0], max_tokens=100, ignore_eos=True)
                stated.append(server.ask("POST", "/v1/chat/completions", body))

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(ask) for _ in range(8)]
            try:
                server.wait_for(lambda: "2 replicas ready" in server.text)
                server.wait_for(lambda: len({one.replica for one in stated[-16:]}) == 2)
            finally:
                done.set()
            for client in clients:
                client.result()
        server.wait_for(lambda: server.text.endswith("1 replica ready\n"))
        stated.append(server.ask("POST", "/v1/chat/completions", requesting(pictures[0][0])))
        assert {one.status for one in stated} == {200} and all(one.whole for one in stated)
        assert stated[-1].json["choices"][0]["message"]["content"] == pictures[0][1]


@contextmanager
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of this machine, to which `auto` leads."""
    port = free_port()
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    words = ["--head", "--block", "--num-cpus", "2", "--include-dashboard", "false"]
    words += ["--node-ip-address", "127.0.0.1", "--port", str(port)]
    words += ["--object-store-memory", str(100 << 20), "--temp-dir", str(folder)]
    ray = Path(sys.executable).with_name("ray")
    with (folder / "told").open("wb") as file:
        process = subprocess.Popen([str(ray), "start", *words], stdout=file, stderr=file)
    try:
        end = time.monotonic() + LONG_S
        while "runtime started" not in (folder / "told").read_text():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        yield
    finally:
        end_all(process, descendants(process.pid))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_another_command_takes_over_and_no_answer_ends_early(
    pictures: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling update: clients ask all the while, and a stream is read that began before."""
    url, word = pictures[0]
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,  # sockets have short names only
        cluster(Path(folder), monkeypatch),
    ):
        port = free_port()
        first = Running(Path(folder) / "first", ray="auto", port=port)
        done, stated = threading.Event(), list[Statement]()

        def ask() -> None:
            while not done.is_set():
                stated.append(first.ask("POST", "/v1/chat/completions", requesting(url)))

        began = threading.Event()
        body = requesting(url, stream=True, max_tokens=1500, ignore_eos=True)
        with ThreadPoolExecutor(3) as pool:
            clients = [pool.submit(ask) for _ in range(2)]
            stream = pool.submit(first.ask, "POST", "/v1/chat/completions", body, began)
            assert began.wait(LONG_S)
            before = set(first.metric("mtmd_replica_up"))
            words = ("--alias", "second", "--drain", "120")
            second = Running(Path(folder) / "second", *words, ray="auto", port=port)
            second.wait_for(lambda: first.process.poll() is not None)
            second.wait_for(lambda: before.isdisjoint(second.metric("mtmd_replica_up")))
            done.set()
            for client in clients:
                client.result()
        assert first.process.returncode == 0 and "another command" in first.text
        assert stream.result().whole and stream.result().body.endswith(b"data: [DONE]\n\n")
        assert len(stated) > 10
        for one in stated:
            assert one.status == 200 and one.json["choices"][0]["message"]["content"] == word
        answered = {one.replica for one in stated}  # whether by both old ones, their names decide
        assert answered & before and answered - before, "old and new ones"
        named = requesting(url, model="second")
        assert second.ask("POST", "/v1/chat/completions", named).json["model"] == "second"
        second.process.terminate()
        assert second.process.wait(LONG_S) == 0


def test_ray_serve_deploys_it_from_a_file_of_its_own(
    pictures: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, word = pictures[0]
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(Path(folder), monkeypatch):
        port, config = free_port(), Path(folder) / "config.yaml"
        import_path = "mtmd.commands.serve:ray_application"
        command = "--replicas 1 --threads 1 --alias of-a-file"
        application = {
            "name": "mtmd",
            "route_prefix": "/",
            "import_path": import_path,
            "args": {"command": command},
        }
        http_options = {"host": "127.0.0.1", "port": port}
        config.write_text(json.dumps({"http_options": http_options, "applications": [application]}))
        serve = Path(sys.executable).with_name("serve")
        reported = Path(folder) / "serving"
        with reported.open("wb") as file:
            process = subprocess.Popen([str(serve), "run", str(config)], stdout=file, stderr=file)
        try:
            server = Running.there(process, reported, port)
            server.wait_for(server.is_ready)
            stated = server.ask("POST", "/v1/chat/completions", requesting(url, model="of-a-file"))
            assert stated.json["choices"][0]["message"]["content"] == word
        finally:
            end_all(process, set())


def test_a_client_that_leaves_and_a_device_that_fails() -> None:
    """What an actor hands on, without Ray."""
    from fake_service import FakeService
    from serving import running as serving_here

    from mtmd import DeviceError
    from mtmd.web.replicas.choice import Route
    from mtmd.web.replicas.forwarded import Forwarded, Head, Lost, Taken
    from mtmd.web.replicas.replica import Replica
    from mtmd.web.settings import ServerSettings

    service, end = FakeService(pace_s=0.05), threading.Event()

    def serving(_: Any, settings: ServerSettings, sock: Any, begin: Any) -> None:
        assert settings.tag == "name" and settings.rate_limit == 0
        sock.close()
        with serving_here(service) as server:
            begin(server, service)
            end.wait(LONG_S)

    async def whole(answer: Any) -> list[Any]:
        return [part async for part in answer]

    async def walk() -> None:
        def settings_of(_: Any) -> ServerSettings:
            return ServerSettings(rate_limit=5)

        replica = Replica({}, settings_of, serving, False, lambda: "name")
        await replica.check_health()
        headers = [("Content-Type", "application/json"), ("Host", "127.0.0.1")]
        body = json.dumps({"messages": [{"role": "user", "content": "a b " * 200}], "stream": True})
        request = Forwarded("POST", "/v1/chat/completions", headers, body.encode())
        answer = replica.answer(request, Route())
        assert await anext(answer) == Taken("name")
        head = await anext(answer)
        assert isinstance(head, Head) and (head.status, head.replica) == (200, "name")
        assert await anext(answer)
        await answer.aclose()
        while not service.tickets[0].cancelled.is_set():
            await asyncio.sleep(0.01)
        service.fault = service.refuses = DeviceError("gone")
        with pytest.raises(RuntimeError, match="found 503 at /health"):
            await replica.check_health()
        with pytest.raises(Lost):
            await whole(replica.answer(request, Route()))
        end.set()
        replica._thread.join(LONG_S)
        with pytest.raises(Lost) as lost:
            await whole(replica.answer(request, Route()))
        assert lost.value.replica == "name"
        assert replica._session is not None
        await replica._session.close()

    asyncio.run(walk())


def test_with_keys_and_without_affinity(pictures: list[tuple[str, str]], tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("anna:" + KEY)
    keys.chmod(0o600)
    words = ("--no-affinity", "--api-key-file", str(keys))
    with running(tmp_path / "told", *words) as server:
        for path in ("/v1/models", "/metrics", "/v1/files"):
            refused = server.ask("GET", path)
            assert refused.status == 401 and refused.json["error"]["code"] == "invalid_api_key"
        assert server.ask("GET", "/health").status == 200
        server.key = KEY
        left(server, pictures[0][0])
        hits, replicas = cache_hits(server, pictures, 5)
        print(f"without affinity: {hits:.0%}")
        assert replicas == 2 and hits < 0.9

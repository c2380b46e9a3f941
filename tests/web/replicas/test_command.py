"""What is known before anything is deployed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mtmd import DeviceError, OptionError
from mtmd.cli import parser
from mtmd.cluster.connect import PoolSize
from mtmd.commands.serve import _settings, ray_application
from mtmd.web.replicas import command
from mtmd.web.replicas.command import room
from mtmd.web.settings import ServerSettings


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (PoolSize(4, 2, 0, 2), 5),
        (PoolSize(4, 2, 1, 2), 2),
        (PoolSize(4, 8, 1, 8), 1),
        (PoolSize(4, 16, 0, 16), 0),
    ],
    ids=["CPUs", "GPUs", "CPUs beside GPUs", "too many"],
)
def test_machines_have_room_for_so_many_replicas(size, count):
    there = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0}, {"GPU": 1.0}]
    assert room(there, size) == count


class Deployed(Exception):
    """With what the application would be made of."""


@pytest.fixture
def from_a_file(monkeypatch):
    """`ray_application` with these options, where Ray Serve listens at `there`."""

    def build(options, there=("0.0.0.0", 8000)):
        def deployed(args, _nodes, settings, *_):
            raise Deployed(args, settings)

        monkeypatch.setattr(command, "import_ray", lambda _: None)
        monkeypatch.setattr(command, "nodes", lambda _: [])
        monkeypatch.setattr(command, "_http_options", lambda: there)
        monkeypatch.setattr(command, "_application", deployed)
        with pytest.raises(Deployed) as result:
            ray_application(options)
        return result.value.args

    monkeypatch.delenv("MTMD_API_KEYS", raising=False)
    return build


@pytest.mark.parametrize("there", [("0.0.0.0", 8000), ("10.0.0.1", 80), None])
@pytest.mark.parametrize("words", ["", "--replicas 2 -m org/name"])
def test_a_file_of_ray_serves_own_needs_keys_where_others_can_reach_it(from_a_file, there, words):
    with pytest.raises(OptionError, match="can be reached by others; give --api-key-file"):
        from_a_file({"command": words}, there)


def test_a_file_of_ray_serves_own_has_the_address_of_ray_serve(from_a_file, monkeypatch):
    monkeypatch.setenv("MTMD_API_KEYS", "anna:" + "k" * 20)
    args, settings = from_a_file({"command": "--host 0.0.0.0"})
    assert (args.host, args.port) == (settings.host, settings.port) == ("0.0.0.0", 8000)
    assert settings.needs_key and settings.answers_to("mtmd-serve-svc")
    with pytest.raises(OptionError, match=r"^host: found 127.0.0.1 in `command`, but Ray Serve"):
        from_a_file({"command": "--host 127.0.0.1"})
    with pytest.raises(OptionError, match=r"^port: found 9000 in `command`, but Ray Serve"):
        from_a_file({"command": "--port 9000"})


def test_who_is_not_reached_by_others_or_says_so_needs_no_keys(from_a_file):
    assert from_a_file({}, ("127.0.0.1", 8000))[1].loopback
    assert not from_a_file({"command": "--insecure-no-auth"})[1].loopback


@pytest.mark.parametrize(
    "options",
    [
        {"command": "--bogus 2"}, {"command": "--parallel x"}, {"command": "-m 'a"},
        {"comand": "-m a"}, {"command": ["-m", "a"]},
    ],
    ids=["option", "value", "quotes", "name", "list"],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_told_and_ends_no_process(from_a_file, options):
    with pytest.raises(OptionError, match=r"^(command|args): "):
        from_a_file(options)


NOT_REQUESTED = SimpleNamespace(serving=False, drain=False)


class RayError(Exception):
    pass


class RayServeException(Exception):
    pass


class Serve:
    """As far as the command asks Ray Serve: `whose` application runs, which is gone after so many
    looks at it as `lasts` says.
    """

    def __init__(self, whose="me", lasts=3):
        self.whose, self.lasts, self.deleted, self.state = whose, lasts, [], "RUNNING"

    def status(self):
        self.lasts -= bool(self.deleted)
        there = {command.APP: SimpleNamespace(status=f"ApplicationStatus.{self.state}")}
        return SimpleNamespace(applications=there if self.lasts >= 0 else {})

    def delete(self, name, _blocking):
        self.deleted.append((name, _blocking))
        self.state = "DELETING"

    def get_app_handle(self, _):
        def result(timeout_s):  # noqa: ARG001
            if self.whose is None or self.deleted:
                raise TimeoutError
            return self.whose

        remote = SimpleNamespace(result=result)
        return SimpleNamespace(command=SimpleNamespace(remote=lambda: remote))


@pytest.fixture
def ray_errors(monkeypatch):
    """The classes of Ray's errors, also where Ray is not installed."""
    serve_errors = SimpleNamespace(RayServeException=RayServeException)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=RayError))
    monkeypatch.setitem(sys.modules, "ray.serve", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.serve.exceptions", serve_errors)
    monkeypatch.setattr(command, "LOOK_S", 0.0)


@pytest.mark.usefixtures("ray_errors")
def test_what_is_under_way_is_waited_for_as_long_as_it_may_take(monkeypatch):
    """Ray itself waits for a minute and raises TimeoutError."""
    now = iter(range(0, 10_000, 50))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=id))
    serve = Serve(lasts=4)
    assert command._take_away(serve, "me", False, drain_s=300.0) == "stopped"
    assert serve.deleted == [(command.APP, False)] and serve.lasts < 0
    reported = command._take_away(Serve(lasts=100), "me", False, drain_s=300.0)
    assert reported == "stopped; Ray Serve is still ending replicas"


@pytest.mark.usefixtures("ray_errors")
@pytest.mark.parametrize(
    ("whose", "was_there", "deleted"),
    [("me", True, 1), ("other", False, 0), (None, True, 0), (None, False, 1)],
)
def test_only_ones_own_application_is_taken_away(whose, was_there, deleted):
    serve = Serve(whose)
    reported = command._take_away(serve, "me", was_there, 1.0)
    assert len(serve.deleted) == deleted
    assert (reported == "stopped") is bool(deleted) and ("goes on" in reported) is not deleted


@pytest.mark.usefixtures("ray_errors")
def test_asked_a_second_time_it_waits_no_more():
    serve = Serve(lasts=50)
    assert "still ending" in command._take_away(serve, "me", True, None)
    assert "still ending" in command._take_away(serve, "me", True, None), "it is being deleted"
    assert len(serve.deleted) == 1


def run_until(monkeypatch, deploying, was_there=True):
    """`mtmd serve --ray auto` where deploying raises `deploying`: the exit code, and Ray Serve."""
    serve = Serve("other" if was_there else None)
    serve.lasts = 3 if was_there else -1
    serve.start = lambda **_: None

    def deploy(*_):
        serve.lasts = 3
        raise deploying

    monkeypatch.setattr(command, "import_serve", lambda _: serve)
    monkeypatch.setattr(command, "connected", lambda _: nullcontext())
    monkeypatch.setattr(command, "nodes", lambda _: [])
    monkeypatch.setattr(command, "_application", lambda *_: None)
    monkeypatch.setattr(command, "_deploy", deploy)
    monkeypatch.setattr(command, "_Stopping", lambda: nullcontext(NOT_REQUESTED))
    args = parser().parse_args(["serve", "--ray", "auto"])
    return command.run(args, _settings, None), serve


@pytest.mark.usefixtures("ray_errors")
def test_an_interrupted_takeover_says_that_it_goes_on(monkeypatch, capsys):
    code, serve = run_until(monkeypatch, KeyboardInterrupt())
    assert code == 0 and serve.deleted == []
    assert "Ray Serve continues to replace the application" in capsys.readouterr().out
    code, serve = run_until(monkeypatch, KeyboardInterrupt(), was_there=False)
    assert code == 0 and len(serve.deleted) == 1
    assert capsys.readouterr().out.endswith("stopped\n")


@pytest.mark.usefixtures("ray_errors")
@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            RayServeException("Prefix / is being used by\napplication x"),
            "Prefix / is being used by",
        ),
        (RayError("the head is gone"), "the head is gone"),
        (TimeoutError(), "no answer in time"),
    ],
)
def test_errors_of_ray_are_told_without_a_traceback(monkeypatch, error, reported):
    with pytest.raises(DeviceError, match=f"^ray: {reported}"):
        run_until(monkeypatch, error)


@pytest.mark.usefixtures("ray_errors")
def test_of_an_error_in_another_process_its_cause_is_told(monkeypatch):
    error = RayError("ray::ServeController.deploy() (pid=1, ip=10.0.0.1)\nFile ...")
    error.cause = ValueError("no such thing")
    with pytest.raises(DeviceError, match=r"^ray: no such thing$"):
        run_until(monkeypatch, error)


def test_systemd_is_told_when_it_answers_and_when_it_ends(monkeypatch, capsys):
    reported = []
    monkeypatch.setattr(command, "notify_systemd", lambda *lines: reported.extend(lines))
    monkeypatch.setattr(command, "_ready", lambda _: 2)
    monkeypatch.setattr(command, "_take_away", lambda *_: "stopped")
    stopping = SimpleNamespace(drain=True, serving=False)
    assert command._watch(None, ServerSettings(), "mine", False, True, stopping) == 0
    status = "STATUS=serving at http://127.0.0.1:8080, 2 replicas ready"
    assert reported == ["READY=1", status, "STOPPING=1"]
    assert "2 replicas ready" in capsys.readouterr().out

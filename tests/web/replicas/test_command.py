"""What is known before anything is deployed."""

from __future__ import annotations

import pytest

from mtmd import OptionError
from mtmd.cluster.connect import Seats
from mtmd.commands.serve import ray_application
from mtmd.web.replicas import command
from mtmd.web.replicas.command import room


@pytest.mark.parametrize(
    ("seats", "count"),
    [
        (Seats(4, 2, 0, 2), 5),
        (Seats(4, 2, 1, 2), 2),
        (Seats(4, 8, 1, 8), 1),
        (Seats(4, 16, 0, 16), 0),
    ],
    ids=["CPUs", "GPUs", "CPUs beside GPUs", "too many"],
)
def test_machines_have_room_for_so_many_replicas(seats, count):
    there = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0}, {"GPU": 1.0}]
    assert room(there, seats) == count


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
        with pytest.raises(Deployed) as found:
            ray_application(options)
        return found.value.args

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

"""Options of `mtmd serve --ray`: what goes together is told before anything is started."""

from __future__ import annotations

import pytest

from mtmd.base.errors import OptionError
from mtmd.cli import parser
from mtmd.commands.ray_options import check_ray_options, replicas


def check(*words):
    return check_ray_options(parser().parse_args(["serve", *words]))


def test_one_server_has_no_options_of_several():
    assert check() is False
    for words in (["--replicas", "2"], ["--no-affinity"]):
        with pytest.raises(OptionError, match=f"^{words[0]}: found without --ray"):
            check(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--models", "cache"], ["--models-max", "1"], ["--unload-after", "5"], ["--presets", "x"],
        ["--data", "x"], ["--max-storage", "1"], ["--no-history"], ["--max-connections", "9"],
        ["--max-connections-per-address", "9"], ["--api-key", "k" * 20],
        ["--on-engine-failure", "exit"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_options_that_would_do_nothing_are_refused_by_name(words):
    with pytest.raises(OptionError, match=f"^{words[0]}: found with --ray; "):
        check("--ray", "local", *words)


def test_all_others_go_with_it():
    assert check(
        "--ray", "local", "--replicas", "2:8", "--no-affinity", "--tp", "2", "--drain", "9"
    )
    for word in ("--engine-process", "--no-engine-process"):  # they do nothing any more
        assert check("--ray", "local", word)


@pytest.mark.parametrize(
    ("text", "result"), [(None, None), ("3", (3, 3)), ("1:8", (1, 8)), ("2:2", (2, 2))]
)
def test_how_many_replicas(text, result):
    assert replicas(text) == result


@pytest.mark.parametrize("text", ["", "0", "0:2", "3:2", "1:1001", "-1", "2:", "two", "1:2:3", "٣"])
def test_a_number_of_replicas_that_is_none(text):
    with pytest.raises(OptionError, match=r"^replicas: found .* expected MIN or MIN:MAX"):
        replicas(text)


def test_an_address_that_is_none_is_told_at_once(mtmd):
    reported = mtmd("serve", "--ray", "nowhere")
    assert reported.code == 2 and "expected local, auto, or HOST:PORT" in reported.err

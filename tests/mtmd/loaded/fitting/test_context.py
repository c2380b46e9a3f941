"""A context that cannot be had is refused before a weight is read, with the longest that can."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtmd import finding, loading
from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint.hub import NotInCacheError, Result
from mtmd.finding import DEMO_MODEL, find_checkpoint
from mtmd.kernels.plan import free_memory
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.options.load import LoadOptions

MIB = 1 << 20


def load(**chosen: Any) -> LoadedModel:
    """Nothing of it is read."""
    model = loading.load(dtype="fp32", **chosen)
    model.close()
    return model.loaded


def refused(**chosen: Any) -> str:
    with pytest.raises(OptionError) as reported:
        load(**chosen)
    return str(reported.value)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how much memory the system has."""

    def say(size: float) -> None:
        monkeypatch.setattr(free_memory, "system_bytes", lambda *_: int(size * MIB))
        free_memory.look_again()

    yield say
    free_memory.look_again()


FITS = r"a context of (\d+) \((\d+) beside a picture\)"


def test_a_limit_in_which_it_has_no_room_is_refused_with_what_would_have() -> None:
    limit = "50MiB"
    reported = refused(context=2048, memory_limit=limit)
    assert reported.startswith("memory_limit: found 50.00 MiB, expected at least ")
    match = re.search(rf"lower context or parallel: {FITS} or parallel (\d+) fits$", reported)
    assert match, reported
    text, picture, parallel = map(int, match.groups())
    assert text >= picture > 0
    assert load(context=text, memory_limit=limit).admission.room["cpu"] >= 0
    assert load(context=2048, memory_limit=limit, parallel=parallel).admission.room["cpu"] >= 0


def test_where_fewer_at_once_would_not_help_that_is_not_said() -> None:
    reported = refused(context=2048, memory_limit="25MiB", parallel=1)
    assert re.search(rf"lower context: {FITS} fits$", reported), reported


def test_it_is_held_to_what_is_free_where_it_was_asked_for(free: Any) -> None:
    free(22)
    reported = refused(context=2048)
    assert re.fullmatch(
        r"context: found 2048, for which the model needs 33\.\d+ MiB of cpu, 8\.\d+ MiB of them for "
        rf"keys and values, and 20\.62 MiB can be had; expected one that fits, such as {FITS}",
        reported,
    ), reported
    assert load().admission.room["cpu"] < 0, "nobody asked for one"
    alongside = loading.load_alongside(dtype="fp32", context=2048)
    assert alongside.loaded.admission.room["cpu"] < 0, "others may leave before it is read"
    alongside.close()
    free(30)  # what is left to others, and larger steps than the least, are not held to
    assert load(context=2048).admission.limits["cpu"] < 34 * MIB


def test_weights_that_are_too_large_are_no_reason_to_refuse_a_context(free: Any) -> None:
    free(12)
    load(context=2048)
    reported = refused(context=2048, memory_limit="10MiB")
    assert reported.startswith("memory_limit: found 10.00 MiB") and "lower" not in reported


def test_where_no_context_fits_the_least_is_told() -> None:
    """And it is enough, for one short answer: no less is."""
    reported = refused(context=2048, memory_limit="10MiB")
    match = re.search(
        r"; the weights and one short answer need ([\d.]+) MiB, no context fits below that$",
        reported,
    )
    assert match, reported
    minimum = float(match[1])
    more, less = (f"{minimum + by:.2f}MiB" for by in (0.02, -0.1))
    few = refused(context=2048, memory_limit=more)
    assert few.endswith("lower context or parallel: a context of 32 with parallel 1 fits"), few
    assert load(context=32, parallel=1, memory_limit=more).admission.room["cpu"] >= 0
    assert match[0] in refused(context=2048, memory_limit=less)


def test_from_the_command_line_it_is_one_line(mtmd: Any, one: Path) -> None:
    ran = mtmd(
        "describe", str(one), "--context", "2048", "--memory-limit", "25MiB", "--dtype", "fp32"
    )
    assert ran.code == 2 and ran.out == ""
    assert ran.err.startswith("mtmd describe: --memory-limit: found 25.00 MiB, expected at least ")
    assert ran.err.endswith(": a context of 288 (288 beside a picture) fits\n")
    assert ran.err.count("\n") == 1


def test_of_a_model_that_is_not_here_the_headers_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def resolve(model: str, *_: Any, fetch: bool = True) -> Result:
        if not fetch:
            raise NotInCacheError("not here")
        requested.append(model)
        return Result(DEMO_MODEL)

    monkeypatch.setattr(finding, "resolve_model", resolve)
    monkeypatch.setattr(finding, "fetch_headers", lambda *_: Result(DEMO_MODEL))
    with pytest.raises(OptionError, match="expected at most 2048, which org/far was made for"):
        find_checkpoint("org/far", LoadOptions(context=4096))
    assert not requested, "nothing was fetched"
    find_checkpoint("org/far", LoadOptions(context=1024))
    find_checkpoint("org/far", LoadOptions())
    assert requested == ["org/far"] * 2


def test_headers_that_cannot_be_had_are_left_to_who_fetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> Result:
        raise ModelError("no network")

    def resolve(*_: Any, fetch: bool = True) -> Result:
        if not fetch:
            raise NotInCacheError("not here")
        return Result(DEMO_MODEL)

    monkeypatch.setattr(finding, "resolve_model", resolve)
    monkeypatch.setattr(finding, "fetch_headers", fails)
    assert find_checkpoint("org/far", LoadOptions(context=4096))[0].text.context == 2048

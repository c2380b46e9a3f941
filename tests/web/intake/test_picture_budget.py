"""Pixels of all requests that are under way, shared among clients."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from mtmd import BusyError
from mtmd.base.cores import Cores
from mtmd.base.turns import set_owner
from mtmd.web.intake import picture_budget as module
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.settings import MediaBudget


@pytest.fixture
def budget():
    yield PictureBudget(MediaBudget(server_pixels=100))
    set_owner("")


def hold(budget, resources, owner, pixels):
    set_owner(owner)
    resources.enter_context(budget.stored(pixels))


def test_who_has_many_pictures_decoded_leaves_a_place_for_others(budget):
    set_owner("one")
    for _ in range(budget.decoded_at_once):
        assert budget._decoding.take(within_s=0) is not None
    assert budget._decoding.take(within_s=0) is None
    for other in ("second", "third", "fourth"):  # how many run, the workers' own rule says
        set_owner(other)
        for _ in range(budget.decoded_at_once):
            assert budget._decoding.take(within_s=0) is not None


@pytest.mark.parametrize("usable", [1, 3])
def test_of_one_client_as_many_are_decoded_as_cores_may_be_used_and_some(usable, monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: Cores(64, usable))
    budget = PictureBudget(MediaBudget())
    assert budget.decoded_at_once == max(2, usable) + module.ALONGSIDE_CORES


def test_one_alone_may_hold_all(budget):
    with ExitStack() as resources:
        for _ in range(4):
            hold(budget, resources, "one", 25)
        with pytest.raises(BusyError, match="100 pixels are waiting and 100 may wait"):
            hold(budget, resources, "one", 1)
    with budget.stored(100):
        pass


def test_while_others_ask_one_has_half_and_any_single_request_is_taken(budget):
    with ExitStack() as resources:
        hold(budget, resources, "other", 1)
        hold(budget, resources, "one", 30)
        with pytest.raises(
            BusyError, match=r"30 pixels for this client are waiting and 50 may wait"
        ):
            hold(budget, resources, "one", 21)
        hold(budget, resources, "one", 20)
        hold(budget, resources, "other", 49)
    with ExitStack() as resources:
        hold(budget, resources, "one", 80)  # more than half, by itself
        hold(budget, resources, "other", 20)
    set_owner("one")
    with budget.stored(100):
        pass

"""That a request which cannot be placed keeps no other from its place."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from mtmd.web.replicas import replica_slots
from mtmd.web.replicas.forwarded import Full
from mtmd.web.replicas.replica_slots import LOST_S, SPARE, Slots, scaling


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def stored(location):
    """As long as the task lives."""
    async with location:
        await asyncio.Event().wait()


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_answers_wait_in_their_order_and_beyond_the_queue_it_is_full():
    async def run():
        here = Slots(lambda: ["a", "b"], each=2, fronts=1, queue=2)
        first = [asyncio.ensure_future(stored(here.of_an_answer(""))) for _ in range(4)]
        await settle()
        came = []

        async def wait(number):
            async with here.of_an_answer(""):
                came.append(number)
                await asyncio.Event().wait()

        waiting = [asyncio.ensure_future(wait(number)) for number in range(2)]
        await settle()
        assert came == []
        with pytest.raises(Full):
            async with here.of_an_answer(""):
                pass
        await end(first[0])
        await settle()
        assert came == [0]
        await end(waiting[1])  # whose client has left
        await end(*first)
        async with here.of_an_answer(""):
            pass
        await end(*waiting)

    asyncio.run(run())


def test_metrics_and_lists_need_not_wait_for_answers():
    async def run():
        here = Slots(lambda: ["a"], each=1, fronts=1, queue=100)
        answers = [asyncio.ensure_future(stored(here.of_an_answer(""))) for _ in range(50)]
        await settle()
        async with AsyncExitStack() as stack:
            for _ in range(SPARE):
                await asyncio.wait_for(
                    stack.enter_async_context(here.of_what_computes_nothing()), 5
                )
        await end(*answers)

    asyncio.run(run())


def test_a_replica_that_alone_can_answer_and_is_busy_holds_up_nothing_else(monkeypatch):
    monkeypatch.setattr(replica_slots, "PINNED_S", 0.01)

    async def run():
        here = Slots(lambda: ["a", "b"], each=2, fronts=1, queue=100)
        pinned = [asyncio.ensure_future(stored(here.of_an_answer("a"))) for _ in range(10)]
        await settle()
        async with here.of_an_answer("b"), here.of_an_answer(""):
            pass
        with pytest.raises(Full):
            async with here.of_an_answer("a"):
                pass
        await end(*pinned)
        async with here.of_an_answer("a"):
            pass
        assert len(here._pinned) == 1

    asyncio.run(run())


def test_where_a_replica_comes_what_waits_is_let_on(monkeypatch):
    monkeypatch.setattr(replica_slots, "LOOK_S", 0.01)

    async def run():
        names = []
        here = Slots(lambda: names, each=1, fronts=1, queue=1)
        task = asyncio.ensure_future(here.of_an_answer("").__aenter__())
        await settle()
        assert not task.done()
        names.append("a")
        await asyncio.wait_for(task, 5)

    asyncio.run(run())


def test_a_replica_that_was_lost_has_no_places_though_it_is_still_named():
    async def run():
        names, now = ["a", "b"], 0.0
        here = Slots(lambda: names, each=2, fronts=1, queue=1, clock=lambda: now)
        here.lost("a")
        tasks = [asyncio.ensure_future(stored(here.of_an_answer(""))) for _ in range(3)]
        await settle()
        assert here._answers._stored == 2
        again = asyncio.ensure_future(stored(here.of_an_answer("", again=True)))
        await settle()
        assert len(here._answers._line) == 2, "beyond the queue: it had a place before"
        await end(tasks[0])
        await settle()
        assert len(here._answers._line) == 1 and here._answers._stored == 2
        await end(again)
        await settle()
        assert not here._answers._line, "it went first, and now the other one"
        now = LOST_S
        assert here._answers._maximum() == 4, "it was a mistake"
        here.lost("a")
        here.lost("b")
        assert here._answers._maximum() == 4, "of all, that is not known"
        here.lost("")
        names.remove("a")
        assert here._answers._maximum() == 2
        await end(*tasks)

    asyncio.run(run())


def test_nothing_goes_to_rays_router_while_there_is_no_replica(monkeypatch):
    """It would wait there, for as long as a model loads, before all that comes later."""
    monkeypatch.setattr(replica_slots, "LOOK_S", 0.001)

    async def run():
        names = []
        here = Slots(lambda: names, each=2, fronts=1, queue=8)
        kinds = (here.of_an_answer(""), here.of_what_computes_nothing())
        tasks = [asyncio.ensure_future(stored(slot)) for slot in kinds]
        await settle()
        assert not here._answers._stored and not here._light._stored
        names.append("a")
        while not (here._answers._stored and here._light._stored):
            await asyncio.sleep(0.001)
        await end(*tasks)

    asyncio.run(run())


def test_so_many_replicas_as_are_wanted_between_two_numbers():
    assert scaling(3, 3, 16) == {"num_replicas": 3}
    result = scaling(2, 8, 16)["autoscaling_config"]
    assert (result["min_replicas"], result["max_replicas"]) == (2, 8)
    assert result["target_ongoing_requests"] == 16, "as docs/replicas.md says of --parallel"
    assert (result["upscale_delay_s"], result["downscale_delay_s"]) == (30, 600), (
        "half a minute, ten"
    )


def test_where_all_are_busy_more_replicas_are_wanted():
    """A front gives Ray enough to see: its own queue Ray does not count."""
    parallel, each = 16, 2 * 16

    async def run():
        names = ["a"]
        here = Slots(lambda: names, each, fronts=1, queue=1000)
        tasks = [asyncio.ensure_future(stored(here.of_an_answer(""))) for _ in range(100)]
        await settle()
        target = scaling(1, 8, parallel)["autoscaling_config"]["target_ongoing_requests"]
        seen = []
        for _ in range(3):
            here._answers._let_in()
            seen.append(here._answers._stored)
            names[:] = [f"{n}" for n in range(seen[-1] // target)]
        await end(*tasks)
        return seen, len(names)

    assert asyncio.run(run()) == ([32, 64, 100], 6)

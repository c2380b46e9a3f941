"""What one tenant asked about is not known, and not shown, when another asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtmd.events import Answer, Finished
from mtmd.loading import load
from mtmd.prompt.conversation import user_message
from mtmd.service.service import Service, Ticket

COUNT = "How many shapes are there?"


def requested(image: Any, prompt: str = COUNT) -> list[Any]:
    return [user_message(image, prompt)]


def answer(ticket: Ticket) -> Answer:
    *_, last = ticket
    assert isinstance(last, Finished)
    return last.answer


def test_tenants_know_nothing_of_each_other(world: dict[int, Path]) -> None:
    """Neither the prompt nor the picture that another asked about is known, not even while it is
    being encoded; and what the encoder got is shown to who asked.
    """
    service = Service(load(device="cpu"))
    question = requested(world[3], "Describe the image. " * 10)  # more than a page
    first = answer(service.submit(question, tenant="a")).receipt
    again = answer(service.submit(question, tenant="a")).receipt
    assert again.images[0].cached and again.reused_tokens >= 32 and again.encode_ms == 0
    other = answer(service.submit(question, tenant="b")).receipt
    assert (other.images[0].cached, other.reused_tokens) == (False, 0) and other.encode_ms > 0
    sha256 = first.images[0].sha256
    third = [service.processed(sha256, tenant) is not None for tenant in ("a", "b", "c", "")]
    assert third == [True, True, False, False]
    tiles = service.stats().encode_tiles
    tickets = [service.submit(requested(world[4]), tenant=tenant) for tenant in ("a", "b", "a")]
    assert len({answer(ticket).text for ticket in tickets}) == 1
    assert service.stats().encode_tiles == tiles + 2, "one for each who asked, and no more"
    service.close()


def test_a_prompt_that_was_written_on_is_known_to_who_wrote_it(world: dict[int, Path]) -> None:
    """What an answer added is kept under its tenant's salt too."""
    service = Service(load(device="cpu"))
    first = answer(service.submit(requested(world[1], "Describe the image."), tenant="a"))
    turn = [
        *requested(world[1], "Describe the image."),
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": COUNT},
    ]
    reused = [
        answer(service.submit(turn, tenant=tenant)).receipt.reused_tokens for tenant in ("b", "a")
    ]
    assert reused[0] == 0 and reused[1] >= 32
    service.close()


def test_tenants_that_share_their_caches(world: dict[int, Path]) -> None:
    service = Service(load(device="cpu"), share_cache=True)
    question = requested(world[3], "Describe the image. " * 10)  # more than a page
    answer(service.submit(question, tenant="a"))
    other = answer(service.submit(question, tenant="b")).receipt
    assert other.images[0].cached and other.reused_tokens >= 32
    assert service.processed(other.images[0].sha256, "c") is None, "a picture is still its owner's"
    service.close()

"""The menu of LoRA adapters beside the model's name."""

from __future__ import annotations

import os
from dataclasses import replace

from mtmd.checkpoint.facts import ServedAdapter

SHOTS = os.environ.get("SCREENSHOTS")  # a folder


def ask(person, text):
    answers = person.page.locator(".answer .receipt").count()
    person.page.fill("#prompt", text)
    person.page.press("#prompt", "Enter")
    person.until(f"document.querySelectorAll('.answer .receipt').length === {answers + 1}")


def test_an_adapter_is_chosen_and_left(visit, fake):
    adapters = (ServedAdapter("formal", "formal", 1.0), ServedAdapter("brief", "b.gguf", 0.5))
    fake.checkpoint_facts = replace(fake.checkpoint_facts, adapters=adapters)
    person = visit()
    page = person.page
    page.wait_for_selector("#adapter:visible")
    assert page.locator("#adapter option").all_inner_texts() == ["no adapter", "formal", "brief"]
    ask(person, "hi")
    assert "adapter" not in fake.tickets[-1].chosen
    page.select_option("#adapter", "brief")
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/adapters.png")
    ask(person, "and now?")
    assert fake.tickets[-1].chosen["adapter"] == "brief"
    page.reload()
    person.until("document.getElementById('adapter').value === 'brief'")
    page.select_option("#adapter", "")
    ask(person, "and now?")
    assert "adapter" not in fake.tickets[-1].chosen


def test_there_is_none_without_adapters(person):
    person.page.wait_for_selector("#prompt")
    assert person.page.locator("#adapter:visible").count() == 0

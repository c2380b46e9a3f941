"""The menu of tasks, where the model has some: their words go into the message box. Boxes that an
answer gives in its own notation are drawn over the page.
"""

from __future__ import annotations

import os
from dataclasses import replace

SHOTS = os.environ.get("SCREENSHOTS")  # a folder


def test_a_task_is_words_in_the_message_box(visit, fake):
    tasks = {"text": "OCR:", "layout": "Spotting:"}
    fake.checkpoint_facts = replace(fake.checkpoint_facts, tasks=tasks)
    person = visit()
    page = person.page
    page.wait_for_selector("#task:visible")
    assert page.locator("#task option").all_inner_texts() == ["Task…", "text", "layout"]
    page.select_option("#task", label="layout")
    assert page.input_value("#prompt") == "Spotting:"
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/tasks.png")
    page.press("#prompt", "Enter")
    person.until("document.querySelectorAll('.answer .receipt').length === 1")


def test_models_without_tasks_have_no_menu(visit):
    person = visit()
    person.page.wait_for_selector("#send:visible")
    assert person.page.locator("#task").is_hidden()

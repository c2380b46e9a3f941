"""Text files on the page: attached, sent as a part of the message, shown folded, taken up again."""

import pytest

CODE = 'def f():\n    return "``` and ````"\n\nFile: other.py\n```\nx\n```\n'
SENT = f"What does it do?\n\nFile: code.py\n`````\n{CODE}`````"


def attached(name, data, kind="text/plain"):
    return {"name": name, "mimeType": kind, "buffer": data}


def words(ticket):
    content = ticket.messages[-1]["content"]
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def test_a_file_is_a_part_of_the_message_and_is_taken_up_again(person, fake):
    page = person.page
    page.set_input_files("#files", files=[attached("code.py", CODE.encode(), "text/x-python")])
    page.wait_for_selector(".text-file .file-name:text-is('code.py')")
    page.fill("#prompt", "What does it do?")
    page.press("#prompt", "Enter")
    person.answered()
    assert words(fake.tickets[-1]) == SENT
    person.lists("What does it do? File: code.py")
    page.click(".bubble .file summary")
    assert page.inner_text(".bubble .file code") == CODE.rstrip("\n")
    assert page.inner_text(".bubble .file summary").split("\n")[-1] == "7 lines"
    assert person.axe() == [] and person.overflow() == 0
    page.hover(".message.user")
    page.click(".message.user [aria-label='Edit']")
    assert page.input_value("#prompt") == "What does it do?"
    page.wait_for_selector(".text-file")
    page.fill("#prompt", "And now?")
    page.press("#prompt", "Enter")
    person.answered()
    assert words(fake.tickets[-1]) == SENT.replace("What does it do?", "And now?")
    page.reload()
    page.wait_for_selector(".bubble .file")
    assert page.locator(".text-file").count() == 0


def test_a_file_that_was_just_chosen_goes_with_the_message(person, fake):
    page = person.page
    page.fill("#prompt", "and this?")
    files = [attached("a.md", b"\xef\xbb\xbf# A\r\nb"), attached("b.unknown", "é\n".encode(), "")]
    page.set_input_files("#files", files=files)
    page.press("#prompt", "Enter")
    person.answered()
    expected = "and this?\n\nFile: a.md\n```\n# A\nb\n```\n\nFile: b.unknown\n```\né\n```"
    assert words(fake.tickets[-1]) == expected
    assert page.locator(".bubble .file").count() == 2


def test_a_draft_keeps_its_files(person):
    page = person.page
    page.set_input_files("#files", files=[attached("notes.txt", b"one\ntwo")])
    page.wait_for_selector(".text-file")
    page.fill("#prompt", "sum")
    page.reload()
    page.wait_for_selector(".text-file .file-name:text-is('notes.txt')")
    assert page.input_value("#prompt") == "sum"
    page.click("[aria-label='Remove notes.txt']")
    page.wait_for_selector(".text-file", state="detached")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x.txt is empty"),
        (b"a" * 500_001, "x.txt was left out: the text files of one message may have 500,000"),
    ],
    ids=["empty", "too long"],
)
def test_what_is_no_text_file_of_a_message_is_told(person, data, message):
    person.page.set_input_files("#files", files=[attached("x.txt", data)])
    person.page.wait_for_selector(f".toast:has-text('{message}')")
    assert person.page.locator(".thumb").count() == 0


def test_a_file_of_many_fences_and_a_drawing_are_text(person, fake):
    person.expects = ("400",)  # the first is too long for the model
    page = person.page
    ticks, svg = b"` " * 130_000, b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    files = [attached("ticks.txt", ticks), attached("a.svg", svg, "image/svg+xml")]
    page.set_input_files("#files", files=files)
    page.wait_for_selector(".text-file .file-name:text-is('a.svg')")
    page.click("[aria-label='Remove ticks.txt']")
    page.fill("#prompt", "what?")
    page.press("#prompt", "Enter")
    person.answered()
    assert words(fake.tickets[-1]).endswith(f"File: a.svg\n```\n{svg.decode()}\n```")


def test_a_file_that_is_read_late_is_not_put_into_another_conversation(person):
    page = person.page
    person.say("first")
    page.evaluate(
        """() => {
            const slow = Blob.prototype.arrayBuffer;
            Blob.prototype.arrayBuffer = async function () {
                await new Promise((go) => setTimeout(go, 600));
                return slow.call(this);
            };
        }"""
    )
    page.set_input_files("#files", files=[attached("late.txt", b"one")])
    page.click("#new-chat")
    page.wait_for_selector("#welcome")
    page.wait_for_timeout(1000)
    assert page.locator(".text-file").count() == 0


@pytest.mark.parametrize("data", [b"\x00\x01", b"\xff\xfe\xfd text"], ids=["zeros", "not UTF-8"])
def test_other_bytes_are_refused_by_the_server(person, data):
    person.expects = ("400",)
    person.page.set_input_files("#files", files=[attached("x.bin", data, "")])
    person.page.wait_for_selector(".toast:has-text('x.bin: found')")
    assert person.page.locator(".thumb").count() == 0

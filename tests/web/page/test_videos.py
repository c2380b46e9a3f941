"""Videos on the page: attached, cut to a part, asked about, and found at the times of an answer."""

from __future__ import annotations

import pytest
from clips import video
from fake_service import FakeService
from serving import client_for

from mtmd import FrameReceipt, VideoReceipt


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    path = tmp_path_factory.mktemp("films") / "film.webm"
    path.write_bytes(video(40, fps=10, format="webm", codec="libvpx"))
    return path


def seen() -> VideoReceipt:
    frames = tuple(FrameReceipt(i * 10, float(i), "ab" * 32, 0, 9, False) for i in range(3))
    return VideoReceipt(
        4.0,
        10.0,
        40,
        "vp8",
        (96, 64),
        (96, 96),
        frames,
        27,
        "cd" * 32,
        12.0,
        False,
        "frames as pictures: x has no video of its own",
        ("variable frame rate",),
    )


def test_a_video_is_cut_asked_about_and_found_at_the_times_of_its_answer(person, fake, film):
    page = person.page
    fake.words, fake.videos = "It turns at 0:02 and stops after 3 s, not at 12 s.", (seen(),)
    person.attach(film)
    page.click("[aria-label^='Play or cut film.webm']")
    person.until("document.querySelector('#video-player').readyState > 0")
    assert person.axe() == [] and page.inner_text("#video-info") == "96 × 64 px, 0:04"
    page.fill("#video-from", "1")
    page.fill("#video-to", "0.5")
    page.click("#video-trim [type=submit]")
    assert page.is_visible("#video")  # it ends before it begins
    page.fill("#video-to", "3.5")
    page.click("#video-trim [type=submit]")
    assert page.inner_text(".thumb .video-part") == "0:01–0:03.5"
    person.say("what happens?")
    (part,) = [p for p in fake.tickets[-1].messages[0]["content"] if p["type"] == "video"]
    assert (part["start"], part["end"]) == (1.0, 3.5)
    assert page.inner_text(".message.user .video-part").strip() == "0:01–0:03.5"
    assert page.locator(".message.answer .time").all_inner_texts() == ["0:02", "3 s"]
    page.click(".message.answer .time >> nth=0")
    person.until(
        "document.querySelector('#video').open && document.querySelector('#video-player').currentTime >= 2"
    )
    assert not page.is_visible("#video-trim")
    page.click("#video-close")
    page.click(".receipt summary")
    person.until("document.querySelectorAll('.frame span').length === 3")
    assert page.locator(".frame span").all_inner_texts() == ["0:00", "0:01", "0:02"]
    assert "3 frames of 40, as 96 × 96 px" in page.inner_text(".seen-video")
    page.click(".frame >> nth=1")
    person.until(
        "document.querySelector('#video').open && Math.abs(document.querySelector('#video-player').currentTime - 1) < 0.2"
    )
    page.click("#video-close")
    assert person.axe() == [] and person.overflow() == 0


def test_the_part_is_kept_with_its_message(person, fake, film):
    page = person.page
    fake.videos = (seen(),)
    person.attach(film)
    page.click("[aria-label^='Play or cut film.webm']")
    page.fill("#video-to", "2")
    page.click("#video-trim [type=submit]")
    person.say("what?")
    page.reload()
    page.wait_for_selector(".message.user .video-part")
    assert page.inner_text(".message.user .video-part").strip() == "0:00–0:02"


def test_a_stored_video_comes_in_parts_and_has_a_small_picture(film):
    client = client_for(FakeService())
    data = film.read_bytes()
    made = client.post("/api/images?name=film.webm", data=data).json
    assert (made["kind"], made["width"], made["height"]) == ("video/webm", 96, 64)
    assert made["seconds"] == pytest.approx(4)
    part = client.get(f"/api/images/{made['sha256']}", headers={"Range": "bytes=4-9"})
    assert (part.status_code, part.data) == (206, data[4:10])
    whole = client.get(f"/api/images/{made['sha256']}")
    assert (whole.data, whole.mimetype) == (data, "video/webm")
    small = client.get(f"/api/images/{made['sha256']}/small")
    assert small.mimetype == "image/jpeg" and small.data[:2] == b"\xff\xd8"
    wrong = client.post("/api/images?name=a.mp4", data=b"\0\0\0\x18ftypisom" + bytes(99))
    assert (wrong.status_code, wrong.json["error"]["code"]) == (400, "invalid_video")

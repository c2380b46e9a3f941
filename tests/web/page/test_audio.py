"""Audio on the page: attached, played beside the message, recorded from a microphone, and refused
where the model takes none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from browsing import Visitor
from clips import video
from fake_service import FakeService
from serving import running
from sounds import tones, wav

from mtmd.clip.audio.instructions import Instructions
from mtmd.receipt import AudioReceipt

HEARD = AudioReceipt(1.5, 16_000, 1, "pcm_s16le", 20, "ab" * 32, False, 1.0, ())
MICROPHONE = """() => {
    navigator.mediaDevices.getUserMedia = async () => {
        const context = new AudioContext();
        const tone = new OscillatorNode(context, { frequency: 440 });
        const out = context.createMediaStreamDestination();
        tone.connect(out);
        tone.start();
        return out.stream;
    };
}"""


@pytest.fixture
def talk(tmp_path):
    path = tmp_path / "talk.wav"
    path.write_bytes(wav(tones(1.5)))
    return path


@pytest.fixture
def hearing():
    service = FakeService()
    service.instructions = Instructions("down", "in {language}", "into {language}", 30.0)
    return service


@pytest.fixture
def listener(browser, hearing):
    with running(hearing) as server:
        visitor = Visitor(browser, server.url)
        yield visitor
        visitor.close()


def parts_of(service, kind):
    return [p for p in service.tickets[-1].messages[0]["content"] if p["type"] == kind]


def audio_of(service):
    return parts_of(service, "audio")


def test_a_file_is_attached_asked_about_and_played_from_a_time(listener, hearing, talk):
    page, hearing.words = listener.page, "It rises at 0:01."
    hearing.sounds = (HEARD,)
    listener.attach(talk)
    assert page.inner_text(".thumb .video-part") == "0:01.5"
    listener.say("what is it?")
    (part,) = audio_of(hearing)
    assert part["audio"].check().seconds == 1.5
    listener.until("document.querySelector('.message.user audio').duration > 1")
    assert page.locator(".message.answer .time").all_inner_texts() == ["0:01"]
    page.click(".message.answer .time")
    listener.until(
        "document.querySelector('#video').open && document.querySelector('#video-player').currentTime >= 1"
    )
    page.click("#video-close")
    assert listener.axe() == []


def test_the_microphone_is_recorded(listener, hearing):
    page = listener.page
    page.evaluate(MICROPHONE)
    page.click("#add")
    page.click("#record")
    page.wait_for_selector("#recording:not([hidden])")
    listener.until("document.querySelector('#record-level').value > 0.1")
    assert listener.axe() == []
    listener.until("document.querySelector('#record-time').textContent >= '0:01'")
    page.click("#record-stop")
    page.wait_for_selector(".thumb:not(.loading) .video-part")
    assert page.is_hidden("#recording")
    listener.say("what is it?")
    (part,) = audio_of(hearing)
    audio = part["audio"].audio(16_000)
    assert audio.facts.rate == 16_000 and 0.7 < audio.facts.seconds < 30
    spectrum = np.abs(np.fft.rfft(audio.samples))
    assert abs(spectrum.argmax() / audio.facts.seconds - 440) < 5


def test_a_model_without_audio_leaves_it_out(person, talk):
    person.page.set_input_files("#files", str(talk))
    person.page.wait_for_selector("text=takes pictures and videos, and no audio")
    assert person.page.locator(".thumb").count() == 0
    assert person.page.locator("#record").get_attribute("hidden") is not None


def test_the_wave_form_shows_where_it_is_loud_and_seeks(listener, tmp_path):
    page, path = listener.page, tmp_path / "late.wav"
    samples = tones(3.0)
    samples[: len(samples) // 2] *= 0.01
    path.write_bytes(wav(samples))
    listener.attach(path)
    page.click(".thumb .picture")
    page.wait_for_selector("#video-wave .wave:not([hidden])")
    assert not page.evaluate("document.querySelector('#video-player').muted")
    page.click("#video-close")
    listener.say("what is it?")
    wave = page.locator(".message.user .wave")
    wave.wait_for()
    heights = page.evaluate(
        "[...document.querySelector('.message.user .wave path').getAttribute('d')"
        ".matchAll(/v([0-9.]+)h-/g)].map((one) => Number(one[1]))"
    )
    assert len(heights) == 120 and max(heights[:55]) < 0.1 < min(heights[65:])
    assert listener.axe() == []
    box = wave.bounding_box()
    wave.click(position={"x": box["width"] * 0.75, "y": box["height"] / 2})
    played = "document.querySelector('.message.user audio').currentTime"
    assert abs(page.evaluate(played) - 2.25) < 0.05
    assert wave.get_attribute("aria-valuetext") == "0:02 of 0:03"
    wave.press("Home")
    assert page.evaluate(played) == 0
    wave.press("ArrowRight")
    assert page.evaluate(played) == 3


def test_sound_of_videos_can_be_left_out(browser, hearing, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(video())
    hearing.checkpoint_facts = replace(hearing.checkpoint_facts, video_sound=True)
    with running(hearing) as server:
        visitor = Visitor(browser, server.url)
        visitor.attach(path)
        visitor.say("what is it?")
        assert "no_sound" not in parts_of(hearing, "video")[0]
        visitor.page.click("#open-settings")
        visitor.page.select_option("[name=no_sound]", "true")
        visitor.page.click("#settings [value=ok]")
        visitor.say("and now?")
        assert parts_of(hearing, "video")[0]["no_sound"] is True
        visitor.close()


def test_models_that_hear_no_videos_have_no_such_setting(person):
    person.page.click("#open-settings")
    assert person.page.is_hidden("[name=no_sound]")

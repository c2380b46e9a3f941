"""Audio files of every format, in this process and in a worker; arrays; what is refused, in a
line.
"""

from __future__ import annotations

import wave
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from sounds import encoded, tones, wav

from mtmd.base.errors import AudioError
from mtmd.clip.audio.limits import AudioLimits
from mtmd.clip.audio.recording import AudioFile, GivenSamples
from mtmd.clip.audio.signatures import audio_format, container_format

SECONDS = 0.7
FORMATS = {
    "wav": ("wav", "pcm_s16le", 16_000, "WAV"),
    "wav of 24 bits": ("wav", "pcm_s24le", 48_000, "WAV"),
    "wav of floats": ("wav", "pcm_f32le", 44_100, "WAV"),
    "mp3": ("mp3", "libmp3lame", 44_100, "MP3"),
    "flac": ("flac", "flac", 44_100, "FLAC"),
    "opus in ogg": ("ogg", "libopus", 48_000, "OGG"),
    "m4a": ("ipod", "aac", 44_100, "MOV"),
    "adts": ("adts", "aac", 44_100, "AAC"),
    "opus in webm": ("webm", "libopus", 48_000, "MKV"),
    "mp4": ("mp4", "aac", 44_100, "MOV"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    format, codec, rate, kind = FORMATS[name]
    samples = tones(SECONDS, rate)
    data = encoded(samples, rate, format, codec)
    assert container_format(data[:64]) == kind
    assert audio_format(data[:64]) == (None if name in ("opus in webm", "mp4") else kind)
    audio = AudioFile(data).audio(16_000)
    assert (audio.facts.rate, audio.facts.channels) == (rate, 1)
    assert abs(audio.facts.seconds - SECONDS) < 0.1
    expected = tones(SECONDS, rate)
    assert np.isclose(np.sqrt(np.mean(audio.samples**2)), np.sqrt(np.mean(expected**2)), rtol=0.1)
    # what it resamples with is tested in test_resample.py
    own, apart = (AudioFile(data, isolate=isolate).audio(rate) for isolate in (False, True))
    np.testing.assert_array_equal(apart.samples, own.samples)
    assert apart.facts == own.facts == audio.facts


def test_sixteen_bits_are_divided_by_their_full_scale_and_channels_averaged(tmp_path: Path) -> None:
    left, right = tones(0.3), tones(0.3, seed=1)
    path = tmp_path / "a.wav"
    path.write_bytes(wav(np.stack((left, right))))
    with wave.open(str(path)) as file:
        whole = np.frombuffer(file.readframes(1 << 20), "<i2").reshape(-1, 2)
    expected = (whole.astype(np.float32) / 32768).mean(axis=1, dtype=np.float32)
    audio = AudioFile(path).audio(16_000)
    np.testing.assert_array_equal(audio.samples, expected)
    assert audio.facts.channels == 2 and audio.facts.codec == "pcm_s16le"


def test_arrays() -> None:
    samples = tones(0.2, 16_000)
    for given in (samples, samples.astype(np.float64), np.stack((samples, samples))):
        np.testing.assert_allclose(
            GivenSamples(given, 16_000).audio(16_000).samples, samples, atol=1e-7
        )
    whole = np.rint(samples * 32767).astype(np.int16)
    np.testing.assert_allclose(
        GivenSamples(whole, 16_000).audio(16_000).samples, whole / 32768, atol=1e-7
    )
    assert len(GivenSamples(samples, 8_000).audio(16_000).samples) == 2 * len(samples)
    assert GivenSamples(samples, 8_000).sha256 != GivenSamples(samples, 16_000).sha256


@pytest.mark.parametrize(
    "given",
    [np.zeros((2, 3, 4)), np.zeros(0), np.zeros((65, 10)), np.zeros(5, bool), np.full(5, np.nan)],
)
def test_arrays_that_are_no_audio(given: np.ndarray) -> None:
    with pytest.raises(AudioError, match=r"^audio: found"):
        GivenSamples(given, 16_000).audio(16_000)


REFUSED = {
    b"": "found 0 bytes, expected audio",
    bytes(40): "found nothing but zero bytes, expected a WAV, MP3",
    b"\x89PNG\r\n\x1a\n" + bytes(60): r"found a picture \(PNG\), expected a WAV",
    b"RIFF\x24\0\0\0WAVEfmt ": "found a WAV file that is damaged",
    wav(tones(0.1))[:44]: "found a WAV file of which no sound can be decoded",
    b"OggS" + bytes(200): "found an Ogg file that is damaged",
}


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "apart"])
@pytest.mark.parametrize("data", REFUSED, ids=list(REFUSED.values()))
def test_files_that_are_no_audio(data: bytes, isolate: bool) -> None:
    with pytest.raises(AudioError, match=REFUSED[data]):
        AudioFile(data, name="talk.wav", isolate=isolate).audio(16_000)


def test_limits() -> None:
    data = wav(tones(1.2))
    with pytest.raises(AudioError, match="found 1 seconds, expected at most 1; cut"):
        AudioFile(data, AudioLimits(max_seconds=1.0)).audio(16_000)
    with pytest.raises(AudioError, match=r"found 38,444 bytes, expected at most 100"):
        AudioFile(data, AudioLimits(max_bytes=100))
    # what the header says is not believed
    lies = data[:40] + (3200).to_bytes(4, "little") + data[44:]
    assert AudioFile(lies).audio(16_000).facts.seconds <= 1.2
    flac = encoded(tones(1.2), 16_000, "flac", "flac")
    early = AudioFile(flac[: len(flac) // 2]).audio(16_000).facts
    assert early.seconds < 1 and "s, not at 1.2 s as it says" in early.notes[-1]


@pytest.mark.parametrize("rate", [44_100, 22_050, 8_000])  # MPEG-1, MPEG-2, MPEG-2.5
def test_an_mp3_that_ends_early_says_so(rate: int) -> None:
    """Its first frame says how many there are; with a tag before it, too."""
    mp3 = encoded(tones(2.0, rate), rate, "mp3", "libmp3lame")
    whole = AudioFile(mp3).audio(16_000).facts
    assert not whole.notes and whole.seconds == pytest.approx(2.0, abs=0.1)
    tag = b"ID3\x04\0\0\0\0\x02\x10" + bytes(2 * 128 + 16)
    sync = {44_100: b"\xff\xfb", 22_050: b"\xff\xf3", 8_000: b"\xff\xe3"}[rate]
    for data in (mp3, tag + mp3[mp3.index(sync) :]):
        early = AudioFile(data[: len(data) // 2]).audio(16_000).facts
        assert early.seconds < 1.3 and "s as it says" in early.notes[-1]


@pytest.mark.parametrize("codec", ["pcm_s16le", "pcm_f32le"])
def test_a_wav_that_ends_early_says_so(codec: str) -> None:
    """And none that was written to a pipe, whose length was not known."""
    data = encoded(tones(1.5, 22_050), 22_050, "wav", codec)
    assert not AudioFile(data).audio(16_000).facts.notes
    early = AudioFile(data[: len(data) // 2]).audio(16_000).facts
    assert early.seconds < 1 and "s, not at 1.5 s as it says" in early.notes[-1]
    at = data.index(b"data") + 4
    for size in (b"\0" * 4, b"\xff" * 4):
        piped = data[:at] + size + data[at + 4 :]
        facts = AudioFile(piped).audio(16_000).facts
        assert facts.seconds == pytest.approx(1.5, abs=0.1) and not facts.notes


def test_a_rate_that_changes_midway_is_refused() -> None:
    both = b"".join(encoded(tones(0.3, r), r, "adts", "aac") for r in (44_100, 22_050))
    with pytest.raises(AudioError, match="changes from 44,100 to 22,050 samples a second"):
        AudioFile(both).audio(16_000)


def test_a_playlist_names_no_other_file(tmp_path: Path) -> None:
    other = tmp_path / "secret.wav"
    other.write_bytes(wav(tones(0.2)))
    for text in (f"#EXTM3U\n{other}\n", f"ffconcat version 1.0\nfile '{other}'\n"):
        with pytest.raises(AudioError, match="expected a WAV"):
            AudioFile(text.encode()).audio(16_000)


def test_memory_of_an_open_file_is_not_kept() -> None:
    file = BytesIO(wav(tones(0.1)))
    assert AudioFile(file.getvalue()).check().rate == 16_000

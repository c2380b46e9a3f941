"""Videos in requests: every shape that clients send."""

from __future__ import annotations

import base64
import io

import pytest
from clips import video
from fake_service import FakeService
from serving import client_for, data_url, image_part, png, post_chat

from mtmd.web.settings import HAS_LEFT

TEXT = {"type": "text", "text": "hm"}


@pytest.fixture(scope="module")
def clip() -> bytes:
    return video(12)


@pytest.fixture
def service():
    return FakeService()


def shown(service) -> list[dict]:
    return [p for p in service.tickets[-1].messages[-1]["content"] if p["type"] == "video"]


@pytest.mark.parametrize("shape", ["vLLM", "vLLM, text", "llama.cpp", "llama.cpp, url", "text"])
def test_shapes(service, clip, shape):
    url, plain = data_url(clip, "video/mp4"), base64.b64encode(clip).decode()
    part = {
        "vLLM": {"type": "video_url", "video_url": {"url": url}},
        "vLLM, text": {"type": "video_url", "video_url": url},
        "llama.cpp": {"type": "input_video", "input_video": {"data": plain, "format": "mp4"}},
        "llama.cpp, url": {"type": "input_video", "input_video": {"url": url}},
        "text": {"type": "input_video", "input_video": plain},
    }[shape]
    reply = post_chat(client_for(service), TEXT, image_part(data_url(png())), part)
    assert reply.status_code == 200, reply.json
    (one,) = shown(service)
    with one["video"].opened() as reader:
        assert reader.facts.frames == 12


def test_an_upload(service, clip):
    client = client_for(service)
    form = {"file": (io.BytesIO(clip), "clip.mp4"), "purpose": "user_data"}
    made = client.post("/v1/files", data=form).json
    for part in (
        {"type": "file", "file": {"file_id": made["id"], "fps": 2}},
        {"type": "video_url", "video_url": {"url": made["id"], "fps": 2}},
        {"type": "file", "file": {"file_data": data_url(clip), "filename": "a.mp4", "fps": 2}},
    ):
        assert post_chat(client, TEXT, part).status_code == 200
        assert shown(service)[0]["fps"] == 2


def test_which_frames(service, clip):
    part = {"type": "video_url", "video_url": {"url": data_url(clip), "start": 0.5, "fps": -1}}
    body = {
        "media_io_kwargs": {"video": {"num_frames": 8, "backend": "x"}},
        "mm_processor_kwargs": {"fps": 2, "do_sample_frames": True},
    }
    assert post_chat(client_for(service), TEXT, part, **body).status_code == 200
    (one,) = shown(service)
    assert {k: one[k] for k in one if k not in ("type", "video")} == {
        "fps": 2,
        "max_frames": 8,
        "start": 0.5,
    }


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ({"video_url": {"url": data_url(b"")}}, "invalid_video", "0 bytes"),
        ({"video_url": {"url": "http://example.com/a.mp4"}}, "remote_media_off", "fetch videos"),
        ({"video_url": {"url": "data:,x"}}, "invalid_video", "data:video/mp4;base64"),
        ({"video_url": {"url": data_url(b"x"), "fps": 0}}, None, "fps"),
        ({"input_video": {}}, None, "expected one of data and url"),
    ],
    ids=["empty", "address", "plain", "fps", "nothing"],
)
def test_refusals(service, part, code, words):
    kind = next(iter(part))
    reply = post_chat(client_for(service), {"type": kind, **part})
    error = reply.json["error"]
    assert (reply.status_code, error["code"]) == (400, code) and words in error["message"]


class Reads(FakeService):
    """Takes the frames of a video, of which the first takes its client away."""

    def __init__(self):
        super().__init__()
        self.taken, self.left = [], []

    def submit(self, messages, **options):
        (part,) = [p for p in messages[-1]["content"] if p["type"] == "video"]
        with part["video"].opened() as reader:
            for index, *_ in reader.take(range(12), (96, 64)):
                self.taken.append(index)
                self.left.append(index)
        return super().submit(messages, **options)


def test_who_leaves_while_a_video_is_read(clip):
    service = Reads()
    client = client_for(service)
    part = {"type": "video_url", "video_url": {"url": data_url(clip)}}
    body = {"messages": [{"role": "user", "content": [part, TEXT]}]}
    gone = {HAS_LEFT: lambda: bool(service.left)}
    reply = client.post("/v1/chat/completions", json=body, environ_overrides=gone)
    assert (reply.status_code, service.taken, service.tickets) == (499, [0], [])
    assert post_chat(client, part, TEXT).status_code == 200  # the next on this thread
    assert service.taken == [0, *range(12)]


def test_videos_of_a_request_share_the_time_to_read_them(service, clip):
    part = {"type": "video_url", "video_url": {"url": data_url(clip)}}
    for count in (1, 4):
        assert post_chat(client_for(service), *[part] * count, TEXT).status_code == 200
        times = [one["video"].limits.cpu_s for one in shown(service)]
        assert times == [120 / count] * count


def test_too_many(service, clip):
    part = {"type": "video_url", "video_url": {"url": data_url(clip)}}
    reply = post_chat(client_for(service), *[part] * 9)
    assert (reply.status_code, reply.json["error"]["code"]) == (413, "too_many_videos")


def test_an_upload_that_is_damaged(service):
    form = {
        "file": (io.BytesIO(b"\0\0\0\x18ftypisom" + bytes(99)), "clip.mp4"),
        "purpose": "vision",
    }
    reply = client_for(service).post("/v1/files", data=form)
    assert (reply.status_code, reply.json["error"]["code"]) == (400, "invalid_video")


def test_responses(service, clip):
    body = {
        "model": "fake",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_video", "video_url": data_url(clip), "max_frames": 3},
                    {"type": "input_text", "text": "hm"},
                ],
            }
        ],
    }
    reply = client_for(service).post("/v1/responses", json=body)
    assert reply.status_code == 200 and shown(service)[0]["max_frames"] == 3

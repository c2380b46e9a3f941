"""One prompt about many pictures, videos or recordings, through the service's batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

from mtmd.base.errors import DeviceError, MtmdError, OptionError
from mtmd.batch.inputs import Input
from mtmd.batch.output import Row
from mtmd.events import Answer
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.audio_input import AudioInput, is_recording, kind_of
from mtmd.prompt.conversation import messages_of
from mtmd.prompt.load_image import decoded_bytes, read_picture, read_url
from mtmd.prompt.url_kinds import is_address
from mtmd.prompt.video_input import FrameRequest, VideoInput, is_video
from mtmd.service.many import Many
from mtmd.service.prepare_ahead import PrepareAhead
from mtmd.service.service import Service

Shown = bytes | VideoInput | AudioInput


class Batch:
    """`parallel` pictures are answered at once; `system` is what the model is told before all
    else.
    """

    def __init__(
        self,
        service: Service,
        prompt: str | None,
        settings: AnswerOptions,
        parallel: int,
        system: str = "",
        frames: FrameRequest | None = None,
        ahead: PrepareAhead | None = None,
    ):
        """`frames`: which are seen of videos. `ahead`: how many are prepared meanwhile."""
        self.service, self.prompt, self.settings = service, prompt, settings
        self.system, self.many = system, Many(parallel, ahead, service.bulk_slots)
        self.frames = frames or FrameRequest()

    def rows(self, inputs: Iterable[Input], ordered: bool = True) -> Generator[Row, None, None]:
        """A row for each picture, in their order or as they come. A picture that cannot be answered
        is a row with its error.

        Leaving the loop gives up those under way. Raises OptionError for what would fail for every
        picture, DeviceError where the device has failed, which can answer none of those left.
        """
        return self.many.results(inputs, self.row, ordered)

    def row(self, one: Input) -> Row:
        """Return the row of a file, or of what came from a pipe or lies behind a URL. For `many` to
        call.
        """
        if one.data is not None:
            data = one.data
            return self.row_of_data(one.name, lambda: (one.name, data))
        if one.is_url:
            kind = kind_of(one.path) if is_address(one.path) else "image"
            return self.row_of_data(one.name, lambda: (one.name, read_url(one.path, kind=kind)))
        if one.end is None and is_recording(one.path, one.path):
            return self._row(one.name, lambda: (one.name, AudioInput(one.path)))
        if is_video(one.path):
            requested = vars(self.frames)
            if one.end is not None:  # the next part begins with the frame at its end
                requested = requested | {
                    "start": one.start,
                    "end": max(one.end - 1e-3, one.start or 0),
                }
            with_path = VideoInput(one.path, **requested)
            return self._row(one.name, lambda: (one.name, with_path))
        return self._row(one.name, lambda: (one.name, read_picture(one.path)), one.page)

    def row_of_data(self, name: str, read: Callable[[], tuple[str, bytes]]) -> Row:
        """Return the row of data of what `read` gives: a name, and the bytes of a picture, a video
        or audio. `name` is that of the row where it raises MtmdError. For `many` to call.
        """

        def source() -> tuple[str, Shown]:
            result, data = read()
            if is_recording(data, result):
                return result, AudioInput(data)
            return result, VideoInput(data, **vars(self.frames)) if is_video(data) else data

        return self._row(name, source)

    def _row(
        self, name: str, source: Callable[[], tuple[str, Shown]], page: int | None = None
    ) -> Row:
        """`page` of a PDF, from 1 on; None for the first, with a warning if there are more."""
        digest, notes = None, list[str]()
        try:
            name, result = source()
            if isinstance(result, bytes):
                digest = hashlib.sha256(result).hexdigest()
                self.many.make_room(decoded_bytes(result))
                shown: Any = self.service.load_image(result, unnamed=name, page=(page or 1) - 1)
                if page is None and shown.pages > 1:
                    notes.append(f"only page 1 of {shown.pages:,} was read; --pages reads each")
            else:
                self.many.make_room(None)
                shown = result
            messages = messages_of(shown, self.prompt, self.system, task=self.settings.task)
            answer = self.many.finish(self.service.submit_bulk(messages, self.settings))
            digest = digest or (answer.receipt.videos or answer.receipt.audio)[0].sha256
            return _answered(name, digest, answer, self.service.model_warnings, notes)
        except (OptionError, DeviceError):
            raise
        except MtmdError as error:
            return Row(name, digest, error=str(error))


def _answered(
    name: str, digest: str, answer: Answer, usual: Collection[str], notes: Sequence[str]
) -> Row:
    """`usual` are the warnings that every answer of the model has: no row repeats them. `notes`
    come before the others.
    """
    took = answer.receipt
    warnings = [*notes, *(warning for warning in took.warnings if warning not in usual)]
    return Row(
        name,
        digest,
        answer.text,
        None,
        took.finish,
        took.prompt_tokens,
        took.image_tokens,
        took.output_tokens,
        queued_ms=round(took.queued_ms, 2),
        preprocess_ms=round(took.preprocess_ms, 2),
        encode_ms=round(took.encode_ms, 2),
        prefill_ms=round(took.prefill_ms, 2),
        decode_ms=round(took.decode_ms, 2),
        thinking=answer.thinking or None,
        thinking_tokens=took.thinking_tokens,
        warnings="; ".join(warnings) or None,
    )

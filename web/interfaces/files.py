"""OpenAI's routes for files: upload a picture, a video or audio once, refer to it by the id that
comes back.
"""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, request

from mtmd import ImageError
from mtmd.prompt.audio_input import is_audio_data
from mtmd.prompt.video_input import is_video_data
from mtmd.web.access import owner
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.intake.request_limits import Body, Work, takes
from mtmd.web.intake.uploads import Upload, Uploads

PURPOSES = ("vision", "user_data")
LONGEST_NAME = 255


def blueprint(uploads: Uploads, budget: PictureBudget) -> Blueprint:
    routes = Blueprint("files", __name__)

    @routes.post("/v1/files")
    @takes(Body.FORM, Work.ANSWER)
    def create() -> dict[str, Any]:
        if request.mimetype != "multipart/form-data":
            raise ApiError(415, "expected a form of type multipart/form-data")
        file, purpose = request.files.get("file"), request.form.get("purpose", "")
        if file is None:
            raise ApiError(
                400,
                "file: missing; send the picture, video or audio as the form's field 'file'",
                param="file",
            )
        if purpose not in PURPOSES:
            raise ApiError(400, f"purpose: expected one of {', '.join(PURPOSES)}", param="purpose")
        data = file.stream.read(budget.limits.bytes + 1)
        try:
            if is_audio_data(data[:64]):
                budget.check_audio(data[: budget.limits.bytes + 1], "file")
            elif is_video_data(data[:64]):
                budget.check_video(data[: budget.limits.bytes + 1], "file")
            else:
                budget.size(data, "file")
        except ImageError as error:
            raise ApiError(
                413 if len(data) > budget.limits.bytes else 400,
                str(error),
                param="file",
                code=as_api_error(error, "").code,
            ) from error
        upload = uploads.add(owner(), _plain(file.filename or "picture"), purpose, data)
        return _file_object(upload)

    @routes.get("/v1/files")
    @takes(Body.NOTHING)
    def all_files() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [_file_object(u) for u in uploads.all_of(owner())],
            "has_more": False,
        }

    @routes.get("/v1/files/<id_>")
    @takes(Body.NOTHING)
    def one(id_: str) -> dict[str, Any]:
        return _file_object(uploads.get(owner(), id_))

    @routes.get("/v1/files/<id_>/content")
    @takes(Body.NOTHING, Work.DOWNLOAD)
    def content(id_: str) -> Response:
        # Never shown in a browser as what it might claim to be.
        return Response(
            uploads.read(uploads.get(owner(), id_)),
            mimetype="application/octet-stream",
            headers={"Content-Disposition": "attachment"},
        )

    @routes.delete("/v1/files/<id_>")
    @takes(Body.NOTHING)
    def delete(id_: str) -> dict[str, Any]:
        uploads.delete(owner(), id_)
        return {"id": id_, "object": "file", "deleted": True}

    return routes


def _file_object(upload: Upload) -> dict[str, Any]:
    """Describe a file as OpenAI's servers do."""
    return {
        "id": upload.id,
        "object": "file",
        "bytes": upload.size,
        "created_at": int(upload.created),
        "expires_at": int(upload.expires),
        "filename": upload.name,
        "purpose": upload.purpose,
        "status": "processed",
    }


def _plain(name: str) -> str:
    """A file's name without folders and without what does not print. It is shown, never used as a
    path.
    """
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in last if c.isprintable())[:LONGEST_NAME] or "picture"

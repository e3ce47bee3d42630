"""Queries in the body of a request, read up to a limit."""

from email import message_from_string
from email.message import Message
from typing import Literal

from fastapi import HTTPException, Request
from pydantic import ValidationError

from raycl.serve.schemas import TextQuery

MAX_BYTES = 10_000_000
_MAX_FORM_BYTES = 16_384  # of a form around its file
_FIELD = "image"


async def read_query(request: Request) -> tuple[Literal["image"], bytes] | tuple[Literal["text"], str]:
    """Return the image of a form, or the text of a JSON object.

    Raises ``HTTPException``: 413 for more than 10 MB, 422 for invalid content, 400 for another type.
    """
    header = Message()
    header["Content-Type"] = request.headers.get("content-type", "")
    kind = header.get_content_type()
    if kind == "multipart/form-data":
        image = _field(await _read(request), str(header.get_param("boundary", "")))
        if len(image) > MAX_BYTES:
            raise _too_large()
        return "image", image
    if kind == "application/json":
        try:
            return "text", TextQuery.model_validate_json(await _read(request)).text
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise HTTPException(422, f'the JSON is not a query: {reason}; send {{"text": "..."}}') from None
    raise HTTPException(
        400, f"{kind} is not a query; send a form with the file `{_FIELD}`, or JSON with `text`"
    )


async def _read(request: Request) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BYTES + _MAX_FORM_BYTES:
            raise _too_large()
    return bytes(content)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the query has more than {MAX_BYTES // 10**6} MB; send a smaller one")


def _field(content: bytes, boundary: str) -> bytes:
    """Return the image field of a form (RFC 7578): FastAPI's form parser does not come with Ray Serve."""
    if boundary:
        for part in (b"\r\n" + content).split(b"\r\n--" + boundary.encode("latin-1", "replace"))[1:]:
            head, found, value = part.partition(b"\r\n\r\n")
            header = message_from_string(head.decode("utf-8", "replace").removeprefix("\r\n"))
            if found and header.get_param("name", header="content-disposition") == _FIELD:
                return value
    raise HTTPException(422, f"the form has no file named `{_FIELD}`; send one under this name")

"""The explorer over HTTP: a page for people, and a JSON API."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from raycl.errors import ConfigError, DataError, RayclError, RunError, StorageError
from raycl.serve import schemas
from raycl.serve.auth import add_headers, require_token
from raycl.serve.explorer import Explorer
from raycl.serve.sample_viewer import UnknownSampleError

PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("explorer.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/explorer.css": ("explorer.css", "text/css"),
    "/explorer.js": ("explorer.js", "text/javascript"),
    "/docs.js": ("docs.js", "text/javascript"),
}
_FLAG = re.compile(r"--(id|image|text|vector)\b")  # flags of the command, which the page lacks
_IMAGE = {
    "type": "object",
    "required": ["image"],
    "properties": {
        "image": {"type": "string", "format": "binary", "description": "An image of at most 10 MB."}
    },
}
_QUERY_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": _IMAGE},
            "application/json": {"schema": schemas.TextQuery.model_json_schema()},
        },
    }
}
STATUS: dict[type[RayclError], int] = {
    UnknownSampleError: 404,
    ConfigError: 400,
    DataError: 422,
    StorageError: 503,
    RunError: 503,
}


def create_app(explorer: Explorer, token: str) -> FastAPI:
    """Return the page, which is public, and the API, which requires the token."""
    app = FastAPI(
        title="raycl explorer",
        summary="Query the bank of a run while it trains.",
        version="1",
        docs_url=None,  # FastAPI's page loads scripts from other sites
        redoc_url=None,
    )
    app.middleware("http")(add_headers)
    for path, (name, kind) in _FILES.items():
        app.add_api_route(path, _file(PAGE / name, kind), include_in_schema=False)
    for error, status in STATUS.items():
        app.add_exception_handler(error, _error_handler(status))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.include_router(_router(explorer, token))
    return app


def _router(api: Explorer, token: str) -> APIRouter:
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": schemas.ErrorResponse} for status in (400, 401, 404, 413, 422, 503)
    }
    router = APIRouter(prefix="/api", dependencies=[Depends(require_token(token))], responses=errors)
    router.add_api_route("/stats", api.stats, summary="Statistics of the bank")
    router.add_api_route("/run", api.progress, summary="Loss and evaluation of the run")
    router.add_api_route("/random", api.random, summary="Random samples of the bank")
    router.add_api_route("/nearest", api.nearest, summary="Neighbors of a sample")
    router.add_api_route(
        "/nearest",
        api.nearest_to_query,
        methods=["POST"],
        summary="Neighbors of an image or a text",
        openapi_extra=_QUERY_BODY,
    )
    router.add_api_route("/rows/{id}", api.rows, summary="Rows of a sample")
    router.add_api_route("/samples/{id}", api.sample, summary="A sample as a person sees it")
    return router


def _file(path: Path, kind: str) -> Callable[[], Response]:
    content = path.read_bytes()
    return lambda: Response(content, media_type=f"{kind}; charset=utf-8")


def _error_handler(status: int) -> Callable[[Request, Exception], Response]:
    def handle(_: Request, error: Exception) -> Response:
        line = _FLAG.sub(r"\1", " ".join(str(error).split()))
        return JSONResponse({"detail": line}, status)

    return handle


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for this type only"
    first = error.errors()[0]
    got = f", got {str(first['input'])[:100]!r}" if first["type"] != "missing" else ""
    return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}{got}"}, 422)

"""The token of the API, and the security headers of its responses."""

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import HTTPException, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from raycl.errors import ConfigError

_log = logging.getLogger(__name__)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")  # allowed in an Authorization header
_BEARER = HTTPBearer(auto_error=False, description="The token that the command prints with the URL.")

# No content from other sites, no inline scripts, no frames around the page, no referrer.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(32)


def checked_token(token: str) -> str:
    """Return the token; raises ``ConfigError`` if it is too short or a header cannot carry it."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"a token has 16 to 512 letters, digits and characters of -._~+/, got one of {len(token)} characters; "
            "make one by `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
    return token


def require_token(token: str) -> Callable[..., Awaitable[None]]:
    """Return a dependency that refuses requests without this token with 401."""

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]) -> None:
        if given is None or not secrets.compare_digest(given.credentials.encode(), token.encode()):
            got = "got none" if given is None else "got another one"
            raise HTTPException(
                401,
                f"the explorer requires its token and {got}; open the URL that the command printed",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


async def add_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Add the security headers to every response, error pages included: a middleware."""
    try:
        response = await call_next(request)
    except Exception:  # a bug: its text may hold secrets, so only the log has it
        _log.exception("the explorer could not handle a request")
        response = JSONResponse({"detail": "the explorer failed; its log has the traceback"}, 500)
    response.headers.update(HEADERS)
    return response

"""Who may ask, and what a browser may do with the answers."""

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, final

from fastapi import HTTPException, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycl.errors import ConfigError

_log = logging.getLogger(__name__)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")  # what a header of this kind may carry
_BEARER = HTTPBearer(auto_error=False, description="The token that `raycl bank serve` prints with the URL.")

# Nothing comes from elsewhere, nothing runs that is written into the page, nobody may frame it, and its
# address is told to nobody.
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
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(32)


def checked_token(token: str) -> str:
    """Return the token; raises ``ConfigError`` for one that is short or that a header cannot carry."""
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"a token has 16 to 512 letters, digits and characters of -._~+/, one of {len(token)} characters "
            "came; make one by `python -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
    return token


def asks_for(token: str) -> Callable[..., Awaitable[None]]:
    """Return what lets a call pass that brings this token, and refuses others with 401."""

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)]) -> None:
        if given is None or not secrets.compare_digest(given.credentials.encode(), token.encode()):
            came = "none came" if given is None else "another one came"
            raise HTTPException(
                401,
                f"the explorer asks for its token and {came}; open the URL that `raycl bank serve` printed",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


@final
class SecurityHeadersMiddleware:
    """Put the headers on every answer, whoever gives it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        has_begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            await self._app(scope, receive, send_guarded)
        except Exception:  # a fault of ours: told without its text, which may be about anything
            _log.exception("the explorer could not answer")
            if has_begun:
                raise
            await JSONResponse({"detail": "the explorer has a fault; its log says more"}, 500)(
                scope, receive, send_guarded
            )

"""An API key in front of the routes, as SGLang 0.5.23 has it: what probes and Prometheus ask stays open."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

#: The variable that holds the key; an option would show it to everyone who lists processes.
VARIABLE = "DDTREE_API_KEY"
OPEN = ("/health", "/ready", "/metrics")


class RequireKey:
    """401 for a request without `Authorization: Bearer KEY`, but for OPTIONS and the open routes."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(scope):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or str(scope["path"]).startswith(OPEN):
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), self._key)

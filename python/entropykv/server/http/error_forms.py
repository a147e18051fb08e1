"""Give errors the form of the interface whose route they answer (ASGI middleware)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

Form = Callable[[dict[str, Any], int], dict[str, Any]]
"""Makes the body of an answer from an error in OpenAI's form, its member `error`, and a status."""


class ErrorForms:
    """Convert the errors of all routes below some paths; others keep OpenAI's form."""

    def __init__(self, app: ASGIApp, forms: Mapping[str, Form], root_path: str = "") -> None:
        """Wrap an app whose errors are in OpenAI's form; `forms` are those of the paths."""
        self._app = app
        roots = ("", root_path.rstrip("/"))
        self._forms = {f"{root}{path}": form for path, form in forms.items() for root in roots}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and convert its error if it has one."""
        path = scope.get("path", "")
        form = next(
            (
                form
                for begin, form in self._forms.items()
                if path == begin or path.startswith(f"{begin}/")
            ),
            None,
        )
        if scope["type"] != "http" or form is None:
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Translated(send, form).send)


class _Translated:
    """Collect the body of an error, and send it in another form in the end."""

    def __init__(self, send: Send, form: Form) -> None:
        self._send = send
        self._form = form
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
            return
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = self._converted(self._start["status"])
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        self._start = None
        await self._send({**message, "body": body})

    def _converted(self, status: int) -> bytes:
        """Return the body in the other form; one that is no error of OpenAI's form is unchanged."""
        try:
            error = json.loads(self._body)["error"]
            error["message"]
        except (ValueError, KeyError, TypeError):
            return self._body
        return json.dumps(self._form(error, status)).encode()

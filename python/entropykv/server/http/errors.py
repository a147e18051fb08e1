"""Return errors in the form of OpenAI's API, {"error": {"message", "type", "param", "code"}}, or in
that of the API whose route they answer: ErrorForms.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entropykv.errors import ContextError, PoolError, StorageError

logger = logging.getLogger("entropykv.server")

_TOO_LONG = "This model's maximum context length is"
"""The beginning of OpenAI's message, by which clients such as litellm recognise a prompt that is
too long.
"""
_NO_STORAGE = "the storage of documents does not answer; the server's log says why; try again later"
_MOST_ERRORS = 3
"""How many errors of one body are reported."""
_MOST_PART = 64
"""The most characters of a part of a field's path, which a client may have chosen."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
"""llama-server's types of errors by their status; RequestError has those of other statuses."""


class RequestError(HTTPException):
    """Raised for a request that is answered with an error: a status of 400 to 599, and one
    sentence.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Take a status and a sentence; `param` is the invalid field, `code` one of OpenAI's codes.

        `retry_after` is the number of seconds after which the client should try again.
        """
        super().__init__(status, message)
        self.retry_after = retry_after
        other = "invalid_request_error" if status < 500 else "server_error"
        kind = _TYPES.get(status, other)
        details: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
        self.body = {"error": details}

    def response(self) -> JSONResponse:
        """Return the response that the client receives."""
        answer = JSONResponse(self.body, self.status_code)
        if self.retry_after is not None:
            answer.headers["retry-after"] = str(self.retry_after)
        return answer


def as_request_error(error: BaseException) -> RequestError:
    """Convert an error during a generation for the client; internal errors are logged.

    llama-cpp-python and this package raise ValueError for invalid requests.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ContextError):
        refusal = RequestError(
            400, f"{_TOO_LONG} exceeded: {error}", code="context_length_exceeded"
        )
        if error.n_tokens is not None:  # llama-server's clients look for these fields.
            refusal.body["error"] |= {
                "type": "exceed_context_size_error",
                "n_prompt_tokens": error.n_tokens,
                "n_ctx": error.n_ctx,
            }
        return refusal
    if isinstance(error, TemplateError):
        return RequestError(400, f"the chat template refuses this: {error}", param="messages")
    if isinstance(error, ValueError | PoolError):
        # A PoolError means that the pool has nothing more to swap out or close.
        return RequestError(503 if isinstance(error, PoolError) else 400, str(error))
    # Macros of a template that recursively process a tool's schema raise RecursionError, for
    # example.
    if isinstance(error, RecursionError):
        return RequestError(
            400,
            "what the request holds is nested too deeply for the model's chat template; use fewer "
            "objects and lists within each other",
        )
    logger.error("a generation failed", exc_info=error)
    return RequestError(500, f"the generation failed: {error}; the server continues")


def without_frames(error: RequestError) -> RequestError:
    """Remove traceback, cause and context from an error, and return it.

    Frames of tracebacks hold a request's text and tokens in reference cycles. The memory of large
    requests would be kept until the next garbage collection.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def invalid(errors: Sequence[Any]) -> RequestError:
    """Return the error for pydantic's findings: field and reason of the first few.

    `errors` are dicts with `loc`, the path in the body, and `msg`.
    """
    places = [
        ".".join(str(part)[:_MOST_PART] for part in each["loc"] if part != "body")
        for each in errors[:_MOST_ERRORS]
    ]
    faults = [
        f"{place or 'the body'}: {each['msg']}"
        for place, each in zip(places, errors[:_MOST_ERRORS], strict=True)
    ]
    if len(errors) > _MOST_ERRORS:
        faults.append(f"and {len(errors) - _MOST_ERRORS:,} more")
    return RequestError(400, "; ".join(faults), param=places[0] or None)


def invalid_within(place: str, error: ValidationError) -> RequestError:
    """Return the error for the first of pydantic's findings in a part of a body.

    `place` is the path of the part, such as tools.2.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:_MOST_PART] for part in (place, *first["loc"]))
    return RequestError(400, f"{where}: {first['msg']}", param=place.partition(".")[0])


class ErrorDetails(BaseModel):
    """The details of an error, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of an answer that is an error, in OpenAI's form."""

    error: ErrorDetails


def add_error_handlers(app: FastAPI) -> None:
    """Make all errors of the app have OpenAI's form."""

    @app.exception_handler(RequestError)
    def refused(_: Request, error: RequestError) -> JSONResponse:
        return error.response()

    @app.exception_handler(StorageError)
    def unavailable(_: Request, error: StorageError) -> JSONResponse:
        logger.warning("%s", error)
        return RequestError(503, _NO_STORAGE, retry_after=10).response()

    @app.exception_handler(Exception)
    def failed(_: Request, error: Exception) -> JSONResponse:
        return as_request_error(error).response()

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path} here; see /docs"
        answer = RequestError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    def unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
        return invalid(error.errors()).response()


Form = Callable[[dict[str, Any], int], dict[str, Any]]
"""Makes the body of an answer from an error in OpenAI's form, its member `error`, and a status."""


class ErrorForms:
    """Convert the errors of all routes below some paths; others keep OpenAI's form."""

    def __init__(self, app: ASGIApp, forms: Mapping[str, Form], root_path: str = "") -> None:
        """Wrap an app whose errors are in OpenAI's form. `forms`: for paths such as /api, the
        function that converts an error. `root_path`: the prefix that paths may have behind a proxy.
        """
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

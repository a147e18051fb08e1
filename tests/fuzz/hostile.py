"""Send requests to a server that are wrong, too large, slow, or aborted.

Each of ATTACKS takes a random generator and the port of a server on the loopback interface, and
returns the outcome: a status code, or a word. Unanswered is raised if the server did not answer in
time, and Refused for an answer that must not occur, such as status 500.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

SECONDS = 30.0
"""Seconds in which a server must answer any request, or close the connection."""
EXPECTED = {200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 501, 503, 504}
"""The status codes that answers may have; 421 and 426 do not apply to this server."""
FIELDS = (
    "prompt",
    "messages",
    "max_tokens",
    "n",
    "stop",
    "user",
    "model",
    "seed",
    "temperature",
    "top_p",
    "logit_bias",
    "logprobs",
    "stream",
    "stream_options",
    "response_format",
    "tools",
    "tool_choice",
    "functions",
    "grammar",
    "json_schema",
    "min_tokens",
    "echo",
    "suffix",
)
ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/extras/tokenize",
    "/extras/tokenize/count",
    "/extras/detokenize",
)
READ_ONLY = ("/health", "/v1/models", "/props", "/slots", "/v1/kv", "/metrics", "/", "/docs")
AMBIGUOUS = 'root ::= a a a a a a a a\na ::= b | b a\nb ::= c | c b | ""\nc ::= [a-z ]* | [a-z ]* c'
"""Rules by which one text has very many parses."""

Outcome = str | int
Attack = Callable[[random.Random, int], Outcome]


class Unanswered(AssertionError):  # noqa: N818
    """Raised if the server has not answered within SECONDS."""


class Refused(AssertionError):  # noqa: N818
    """Raised for an answer that no request may get; says which."""


def body_of(**fields: Any) -> bytes:
    """Return the JSON of a request for few tokens, changed by the given fields."""
    return json.dumps({"prompt": "Simon", "max_tokens": 3, "temperature": 0, **fields}).encode()


def post(port: int, path: str, body: bytes, headers: str = "") -> Outcome:
    """Send a request and read the whole answer; returns its status code, or `closed`."""
    with _connection(port) as client:
        _send(client, _head("POST", path, f"Content-Length: {len(body)}\r\n{headers}") + body)
        return _status(client)


def get(port: int, path: str, headers: str = "") -> Outcome:
    """Request a page and read the whole answer; returns its status code, or `closed`."""
    with _connection(port) as client:
        _send(client, _head("GET", path, headers))
        return _status(client)


def _connection(port: int) -> socket.socket:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    except TimeoutError:
        raise Unanswered("a connection was not accepted") from None


def _head(method: str, path: str, headers: str, host: str = "127.0.0.1") -> bytes:
    always = "Content-Type: application/json\r\nConnection: close\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{always}{headers}\r\n".encode()


def _send(client: socket.socket, data: bytes) -> None:
    """Send data; the server may answer and close before it has received everything."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(data)


def _status(client: socket.socket) -> Outcome:
    """Read a whole answer; returns its status or `closed`, or raises Unanswered or Refused."""
    start, ends = b"", time.monotonic() + SECONDS
    try:
        while time.monotonic() < ends:
            part = client.recv(1 << 16)
            if not part:
                break
            start = (start + part)[:4096]
        else:
            raise Unanswered(f"the answer has not ended after {SECONDS} s: {start[:100]!r}")
    except TimeoutError:
        raise Unanswered(f"no answer for {SECONDS} s, after {start[:100]!r}") from None
    except ConnectionResetError:
        pass
    if not start.startswith(b"HTTP/1.1 "):
        return "closed"
    code = int(start[9:12])
    if code not in EXPECTED:
        raise Refused(f"status {code}: {start[-300:]!r}")
    return code


def many_errors(chance: random.Random, port: int) -> Outcome:
    """Send a list of items that are not prompts; each would be a validation error."""
    n = chance.choice((1_000, 100_000, 330_000))
    item = chance.choice(("{}", "[{}]", "null"))
    return post(port, "/v1/completions", b'{"prompt":[' + ",".join([item] * n).encode() + b"]}")


def many_prompts(chance: random.Random, port: int) -> Outcome:
    """Ask for many prompts with many choices each."""
    body = body_of(prompt=["a"] * chance.choice((10, 500, 2000)), n=chance.choice((1, 128)))
    return post(port, "/v1/completions", body)


def ambiguous_grammar(chance: random.Random, port: int) -> Outcome:
    """Send a short grammar by which a text has very many parses."""
    return post(port, "/v1/completions", body_of(grammar=AMBIGUOUS * chance.choice((1, 1, 30))))


def large_schema(chance: random.Random, port: int) -> Outcome:
    """Send a schema whose grammar would be large, in any field of a chat that takes one."""
    n = chance.choice((10**4, 2 * 10**7, 10**12))
    kind = chance.choice(
        (
            {"type": "array", "minItems": n, "items": {"type": "integer"}},
            {"type": "string", "minLength": n},
            {"type": "string", "pattern": f"^(a{{1,{n}}}){{1,{n}}}$"},
            _nested(chance.choice((20, 500, 5000))),
        )
    )
    messages = [{"role": "user", "content": "hi"}]
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": kind}}}
    fields = chance.choice(
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": kind},
                }
            },
            {"response_format": {"type": "json_object", "schema": kind}},
            {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
            {"functions": [function], "function_call": {"name": "f"}},
        )
    )
    body = {"messages": messages, "max_tokens": 2, **fields}
    return post(port, "/v1/chat/completions", json.dumps(body).encode())


def _nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(min(depth, 300)):  # json.dumps limits the depth, too.
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def deep_json(chance: random.Random, port: int) -> Outcome:
    """Send deeply nested lists or objects."""
    depth = chance.choice((100, 3_000, 100_000))
    inner = "[" * depth + "]" * depth
    if chance.random() < 0.5:
        inner = '{"a":' * depth + "1" + "}" * depth
    field = chance.choice(FIELDS)
    return post(port, chance.choice(ROUTES), f'{{"{field}":{inner}}}'.encode())


def long_field(chance: random.Random, port: int) -> Outcome:
    """Send a field that is far too long."""
    text = "x" * chance.choice((1_000, 100_000, 900_000))
    n = len(text) // 8
    fields = chance.choice(
        (
            {"user": text},
            {"model": text, "stream": True},
            {"prompt": text},
            {"suffix": text},
            {"stop": [f"{i}" for i in range(n)]},
            {"logit_bias": {f"{i}": 1 for i in range(n)}},
            {"grammar": f'root ::= "{text}"'},
            {text: 1},
        )
    )
    return post(port, "/v1/completions", body_of(**fields))


def long_text(chance: random.Random, port: int) -> Outcome:
    """Send a long text to tokenize, or many tokens to detokenize."""
    n = chance.choice((1_000, 100_000, 800_000))
    path, body = chance.choice(
        (
            ("/tokenize", {"content": "a b" * (n // 3), "with_pieces": True}),
            ("/extras/tokenize", {"input": "ab" * (n // 2)}),
            ("/detokenize", {"tokens": [5] * (n // 3)}),
            ("/extras/detokenize", {"tokens": [chance.choice((-1, 10**9))] * (n // 12)}),
        )
    )
    return post(port, path, json.dumps(body).encode())


def nonsense_field(chance: random.Random, port: int) -> Outcome:
    """Send a field with a value of a wrong type or far out of range."""
    value = chance.choice(
        (
            None,
            True,
            -1,
            0,
            2**31,
            2**63,
            10**400,
            1e308,
            "",
            "\0",
            "\ud800",
            [],
            [[]],
            {},
            [1, "a"],
        )
    )
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with contextlib.suppress(ValueError):
        body[chance.choice(FIELDS)] = value
    if body.get("max_tokens") in (None, -1):  # An answer without end is valid, and takes long.
        body["max_tokens"] = 2
    return post(port, chance.choice(ROUTES), json.dumps(body).encode())


def no_json(chance: random.Random, port: int) -> Outcome:
    """Send bytes that are not JSON."""
    body = chance.choice((b"", b"{", b"\xff\xfe", b'{"prompt": NaN}', chance.randbytes(2000)))
    return post(port, chance.choice(ROUTES), body)


def no_http(chance: random.Random, port: int) -> Outcome:
    """Send bytes that are not an HTTP request, or hardly one."""
    data = chance.choice(
        (
            chance.randbytes(300) + b"\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5_000 + b"\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        )
    )
    with _connection(port) as client:
        _send(client, data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        return _status(client)


def other_host(chance: random.Random, port: int) -> Outcome:
    """Send the host name of another server, as a page would after DNS rebinding."""
    with _connection(port) as client:
        host = chance.choice(("evil.example", "evil.example:80", "[::1", "a" * 5000))
        _send(client, _head("GET", chance.choice(READ_ONLY), "", host))
        return _status(client)


def prompt_too_long(chance: random.Random, port: int) -> Outcome:
    """Send more tokens than the context holds."""
    return post(port, "/v1/completions", body_of(prompt="a b c " * chance.choice((300, 20_000))))


def leaves(chance: random.Random, port: int) -> Outcome:
    """Disconnect before the answer, or in the middle of a stream."""
    body = body_of(
        prompt="Simon " * chance.randrange(1, 80), max_tokens=300, min_tokens=300, stream=True
    )
    with _connection(port) as client:
        _send(client, _head("POST", "/v1/completions", f"Content-Length: {len(body)}\r\n") + body)
        if chance.random() < 0.6:
            with contextlib.suppress(ConnectionResetError, TimeoutError):
                client.recv(chance.choice((1, 400, 4000)))
        if chance.random() < 0.3:  # Close with a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return "left"


def slow_upload(chance: random.Random, port: int) -> Outcome:
    """Send a body or headers slowly, and then stop."""
    body = body_of(prompt="a" * 5000)
    data = _head("POST", "/v1/completions", f"Content-Length: {len(body)}\r\n")
    data = data + body if chance.random() < 0.6 else data[: chance.randrange(1, len(data))]
    with _connection(port) as client:
        for i in range(12):
            _send(client, data[30 * i : 30 * i + 30])
            time.sleep(chance.uniform(0.0, 0.2))
    return "left"


def slow_reader(chance: random.Random, port: int) -> Outcome:
    """Request a long answer, and read little of it."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.settimeout(SECONDS)
        client.connect(("127.0.0.1", port))
        body = body_of(max_tokens=200, min_tokens=200, stream=True, model="m" * 200)
        _send(client, _head("POST", "/v1/completions", f"Content-Length: {len(body)}\r\n") + body)
        for _ in range(chance.randrange(2, 8)):
            time.sleep(0.25)
            with contextlib.suppress(OSError):
                client.recv(64)
    return "left"


def many_connections(chance: random.Random, port: int) -> Outcome:
    """Open connections and send nothing; then ask for /health."""
    with contextlib.ExitStack() as stack:
        for _ in range(chance.choice((10, 60))):
            stack.enter_context(_connection(port))
        time.sleep(chance.uniform(0.0, 0.5))
        return get(port, "/health")


def many_viewers(chance: random.Random, port: int) -> Outcome:
    """Open viewers, sometimes more than are allowed, and ask for /health while they are served."""
    with contextlib.ExitStack() as stack:
        for _ in range(chance.choice((3, 25))):
            client = stack.enter_context(_connection(port))
            _send(client, _head("GET", "/v1/kv/stream", ""))
        time.sleep(chance.uniform(0.0, 0.5))
        return get(port, "/health")


def flood(chance: random.Random, port: int) -> Outcome:
    """Request the same page again and again."""
    path = chance.choice(READ_ONLY)
    return [get(port, path) for _ in range(30)][-1]


ATTACKS: tuple[Attack, ...] = (
    many_errors,
    many_prompts,
    ambiguous_grammar,
    large_schema,
    deep_json,
    long_field,
    long_text,
    nonsense_field,
    no_json,
    no_http,
    other_host,
    prompt_too_long,
    leaves,
    slow_upload,
    slow_reader,
    many_connections,
    many_viewers,
    flood,
)

"""Read the stream of the cache's states from a running server."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import httpx
import numpy as np

from tests.support.running_server import KEY, Server

PROMPT = "The old garden lay beside the road. " * 60
LONG = {"prompt": PROMPT, "max_tokens": 9000, "min_tokens": 9000, "temperature": 0}


def events(server: Server, query: str = "", most: int = 1, seconds: float = 60) -> list[Any]:
    """Return the first events of a stream as pairs of name and data."""
    found: list[Any] = []
    headers = {"authorization": f"Bearer {KEY}"}
    url = f"{server.url}/v1/kv/stream?{query}"
    with httpx.stream("GET", url, headers=headers, timeout=seconds) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("event: "):
                found.append([line[7:]])
            elif line.startswith("data: "):
                found[-1].append(json.loads(line[6:]))
                if len(found) == most:
                    break
    return found


def planes_of(picture: Any) -> Any:
    shown = picture["map"]
    data = zlib.decompress(base64.b64decode(shown["planes"]))
    shape = (3, shown["rows"], shown["columns"])
    return np.frombuffer(data, np.uint8).reshape(shape)

"""Send requests to an app of one model in this process, and return its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from entropykv.server import ModelOptions
from tests.support.several_models import run, running

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SAID: list[dict[str, Any]] = [{"role": "user", "content": "the land in the"}]


def answers_of(
    model: Path, requests: Sequence[tuple[str, dict[str, Any]]], **options: Any
) -> list[httpx.Response]:
    """Send requests one after the other, as (path, body), to a server of one model; return the
    answers.

    `options` are its ModelOptions.
    """
    given = {"n_ctx": 256, "kv_budget": "128", "n_threads": 1, **options}
    answers = []

    async def talk() -> None:
        async with running(ModelOptions(model=str(model), **given)) as server:
            for path, body in requests:
                # The text is sent as it is, because httpx itself would refuse NaN and lone
                # surrogates.
                content = json.dumps(body)
                headers = {"content-type": "application/json"}
                answers.append(await server.client.post(path, content=content, headers=headers))

    run(talk())
    return answers


def answer_of(model: Path, path: str, body: dict[str, Any], **options: Any) -> Any:
    """Return the JSON of the answer to a single request, which must be 200."""
    (answer,) = answers_of(model, [(path, body)], **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def completed(model: Path, **body: Any) -> Any:
    """Return the choice of a greedy completion, by default of a short prompt and at most 6
    tokens.
    """
    given = {"prompt": "the land", "max_tokens": 6, "temperature": 0.0, **body}
    return answer_of(model, COMPLETION, given)["choices"][0]


def pieces_of(answer: httpx.Response) -> list[Any]:
    """Return the chunks of a streamed answer as parsed JSON."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]

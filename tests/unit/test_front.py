"""The proxy in front of replicas passes requests on, and tells a replica when a client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from entropykv.server.replicas.front import MOST_TRIES, Front

GET = {"type": "http", "method": "GET", "path": "/slots", "headers": []}


class DiedError(Exception):
    """Stand in for Ray's error of a replica that has died."""


class Answer:
    """Stand in for the replicas' handle: answers send the messages, then fail or never end."""

    def __init__(self, *messages: dict[str, Any], died: bool) -> None:
        self.messages, self.died = messages, died
        self.asked = self.cancelled = 0

    def __call__(self, *_: object) -> Answer:
        self.asked += 1
        return self

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for message in self.messages:
            yield message
        if self.died:
            raise DiedError
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled += 1


def sent_by(answer: Answer, *, stays: bool) -> list[dict[str, Any]]:
    """Return what a client receives that waits for the end, or leaves once the answer has begun."""
    sent: list[dict[str, Any]] = []

    async def talk() -> None:
        begun = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if not stays:
                begun.set()

        await asyncio.wait_for(Front(answer, DiedError)(GET, receive, send), 10)

    asyncio.run(talk())
    return sent


START = {"type": "http.response.start", "status": 200, "headers": []}


def test_a_client_that_leaves_ends_the_answer() -> None:
    answer = Answer(START, died=False)
    assert sent_by(answer, stays=False) == [START]
    assert (answer.asked, answer.cancelled) == (1, 1)


def test_a_request_is_sent_again_while_replicas_die() -> None:
    answer = Answer(died=True)
    refused = sent_by(answer, stays=True)
    assert refused[0]["status"] == 503
    assert (answer.asked, answer.cancelled) == (MOST_TRIES, MOST_TRIES)

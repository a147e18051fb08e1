"""Web pages of other origins cannot change anything, whatever they make a browser send."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.routing import APIRouter
from fastapi.testclient import TestClient
from pydantic import BaseModel

from entropykv.server.http.access import OriginCheck, origins_of
from entropykv.server.http.bodies import BodyRoute


class Asked(BaseModel):
    text: str


def client(option: str | None) -> TestClient:
    app, router = FastAPI(), APIRouter(route_class=BodyRoute)

    @router.post("/say")
    async def say(asked: Asked) -> str:
        return asked.text

    @router.get("/say")
    async def said() -> str:
        return "said"

    app.include_router(router)
    origins, pattern = origins_of(option)
    app.add_middleware(OriginCheck, origins=origins, pattern=pattern)
    return TestClient(app, base_url="http://127.0.0.1:8000")


BODY = b'{"text": "hi"}'
OWN, OTHER = "http://127.0.0.1:8000", "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": OWN}, True),
        ({"origin": OTHER}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://127.0.0.1:9000"}, False),
        ({"origin": OTHER, "sec-fetch-site": "cross-site"}, False),
        ({"origin": OWN, "sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"origin": "https://proxied.example", "sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
    ],
)
def test_only_the_servers_own_page_may_send(headers: dict[str, str], allowed: bool) -> None:
    with client(None) as http:
        answer = http.post("/say", content=BODY, headers=headers)
        assert answer.status_code == (200 if allowed else 403), answer.text
        assert http.get("/say", headers=headers).status_code == 200
    if not allowed:
        assert "--cors-origins" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("option", "origin", "allowed"),
    [
        ("http://a.example", "http://a.example", True),
        ("http://a.example", "http://a.example.evil.example", False),
        ("*", OTHER, True),
        ("localhost,http://a.example", "http://localhost:3000", True),
        ("localhost,http://a.example", "http://localhost.evil.example", False),
    ],
)
def test_pages_that_the_server_was_told_of_may_send(
    option: str, origin: str, allowed: bool
) -> None:
    headers = {"origin": origin, "sec-fetch-site": "cross-site"}
    with client(option) as http:
        answer = http.post("/say", content=BODY, headers=headers)
    assert answer.status_code == (200 if allowed else 403)


@pytest.mark.parametrize(
    "kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"]
)
def test_json_is_read_whatever_it_is_called(kind: str | None) -> None:
    """A JSON body is read whatever its content type; `curl -d` names it a form."""
    headers = {} if kind is None else {"content-type": kind}
    with client(None) as http:
        answer = http.post("/say", content=BODY, headers=headers)
    assert (answer.status_code, answer.json()) == (200, "hi")

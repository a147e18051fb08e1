"""The Python client of Ollama works with `entropykv serve` (needs the extra `clients`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.running_server import KEY, Server
from tests.support.served import served

ollama = pytest.importorskip("ollama", reason="needs the extra clients")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # Warnings of other packages are not ours to fix.
]

QUESTION = {"role": "user", "content": "Where is the garden?"}
SHORT = {"num_predict": 12, "temperature": 0}


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from served("--alias", "tiny", "--api-key", KEY)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    opened = ollama.Client(host=server.url, headers={"authorization": f"Bearer {KEY}"})
    yield opened
    opened._client.close()


def test_it_chats_whole_and_in_pieces(client: Any) -> None:
    whole = client.chat("tiny", [QUESTION], options=SHORT)
    pieces = list(client.chat("tiny", [QUESTION], options=SHORT, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert whole.eval_count == 12
    assert whole.done_reason == "length"
    assert whole.total_duration > whole.eval_duration > 0


def test_it_generates(client: Any) -> None:
    whole = client.generate("tiny", "The old garden", raw=True, options=SHORT)
    pieces = list(client.generate("tiny", "The old garden", raw=True, options=SHORT, stream=True))
    assert "".join(piece.response for piece in pieces) == whole.response


def test_it_gets_the_form_that_it_asks_for(client: Any) -> None:
    options = {"num_predict": 60, "temperature": 0}
    schema = Weather.model_json_schema()
    answer = client.chat("tiny", [QUESTION], format=schema, options=options)
    assert Weather.model_validate_json(answer.message.content)
    free = client.generate("tiny", "The weather as JSON", format="json", options=options)
    assert free.response.lstrip()[:1] in ("{", "")


def test_it_gives_tools_and_their_results(client: Any) -> None:
    def walk(to: str) -> str:
        """Walk to a city.

        Args:
            to: the city
        """
        return f"in {to}"

    first = client.chat("tiny", [QUESTION], tools=[walk], options=SHORT)
    messages = [QUESTION, first.message, {"role": "tool", "tool_name": "walk", "content": "there"}]
    assert client.chat("tiny", messages, tools=[walk], options=SHORT).done


def test_it_lists_and_shows_models(client: Any) -> None:
    (model,) = client.list().models
    assert model.model == "tiny"
    assert client.show("tiny").capabilities
    assert [each.model for each in client.ps().models] == ["tiny"]


def test_it_understands_what_is_refused(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="-hf") as pulled:
        client.pull("tiny")
    assert pulled.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="mmproj"):
        client.chat("tiny", [{**QUESTION, "images": [b"hi"]}])
    assert json.dumps(client.chat("tiny", [QUESTION], options=SHORT).model_dump())

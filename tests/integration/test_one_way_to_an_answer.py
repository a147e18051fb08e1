"""The same chat gives the same tokens through the command line, the server and EntropyLlama."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from entropykv import EntropyLlama, Pool, Session
from entropykv.cli import main
from entropykv.server import ModelOptions, ServerOptions, create_app
from tests.support.running_server import MODEL
from tests.support.served import client_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM, TURN = "Answer in a few words.", "Where is the old garden?"
SAID = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TURN}]
N = 14
CACHE: dict[str, Any] = {"n_ctx": 512, "kv_budget": "256", "kv_type": "f16", "n_threads": 1}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "with a seed": {"temperature": 1.3, "seed": 11},
    "with a seed and nucleus": {"temperature": 0.9, "seed": 2**32 - 2, "top_p": 0.7},
}


@pytest.fixture(params=[TEMPLATE, None], ids=["template", "no template"])
def template(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


@pytest.fixture(params=SAMPLING)
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SAMPLING[str(request.param)]


def of_command_line(folder: Path, template: str | None, sampling: dict[str, Any]) -> list[int]:
    """Return the tokens of the prompt and the answer that `run` has read."""
    saved, file = folder / "saved.ekv", folder / "template.jinja"
    flags = {"temperature": "--temp", "seed": "-s", "top_p": "--top-p"}
    flags["repeat_penalty"] = "--repeat-penalty"
    given = [text for name, value in sampling.items() for text in (flags[name], str(value))]
    if template is not None:
        file.write_text(template, encoding="utf-8")
        given += ["--chat-template-file", str(file)]
    run = ["run", "-m", str(MODEL), "-sys", SYSTEM, "-p", TURN, "-n", str(N), "-c", "512"]
    cache = ["--kv-budget", "256", "--kv-type", "f16", "-t", "1", "--save-session", str(saved)]
    assert main([*run, *cache, *given]) == 0
    with Session(MODEL, **CACHE) as session:
        session.files.load(saved)
        return session.tokens


def of_server(template: str | None, sampling: dict[str, Any]) -> dict[str, list[int]]:
    """Return the tokens of the prompt and the answer, perhaps without its last one, for three chat
    APIs of the server.
    """
    others = {name: value for name, value in sampling.items() if name != "max_tokens"}
    of_openai = {name: value for name, value in sampling.items() if name != "repeat_penalty"}
    bodies = {
        "/v1/chat/completions": {"messages": SAID, "max_tokens": N, **sampling},
        "/v1/responses": {
            "input": TURN,
            "instructions": SYSTEM,
            "max_output_tokens": N,
            **of_openai,
        },
        "/api/chat": {
            "model": "any",
            "messages": SAID,
            "stream": False,
            "options": {"num_predict": N, **others},
        },
    }
    found: dict[str, list[int]] = {}

    async def talk() -> None:
        options = ModelOptions(model=str(MODEL), chat_template=template, **CACHE)
        app = await asyncio.to_thread(create_app, options, ServerOptions())
        async with client_of(app) as client:
            for path, body in bodies.items():
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                found[path] = app.state.engine.lanes[0].latest.tokens
        app.state.engine.close()

    asyncio.run(talk())
    return found


def of_entropy_llama(template: str, sampling: dict[str, Any]) -> list[int]:
    arguments: dict[str, Any] = {**CACHE, "n_threads_batch": 1, "verbose": False}
    with closing(EntropyLlama(MODEL, **arguments)) as llama:
        bos = llama._model.token_get_text(llama.token_bos())
        formatter = Jinja2ChatFormatter(template, eos_token="", bos_token=bos)
        llama.chat_handler = formatter.to_chat_handler()
        llama.create_chat_completion(SAID, max_tokens=N, **sampling)  # type: ignore[arg-type]
        return [int(token) for token in llama.input_ids[: llama.n_tokens]]


def test_a_chat_gives_the_same_tokens_at_every_door(
    tmp_path: Path, template: str | None, sampling: dict[str, Any]
) -> None:
    expected = of_command_line(tmp_path, template, sampling)
    doors = of_server(template, sampling)
    if template is not None:  # Without a template, llama_cpp.Llama would use that of Llama 2.
        doors["EntropyLlama"] = of_entropy_llama(template, sampling)
    for door, tokens in doors.items():
        assert tokens == expected[: len(tokens)], door
        assert len(tokens) >= len(expected) - 1, door


def test_penalties_consider_the_prompt_at_every_door_but_llama_cpp_s_own(tmp_path: Path) -> None:
    """Penalties count tokens of the prompt, as in llama.cpp's programs. EntropyLlama is left out,
    because the penalties of llama_cpp.Llama do not.
    """
    penalty = {"temperature": 0.0, "repeat_penalty": 1.5}
    expected = of_command_line(tmp_path, TEMPLATE, penalty)
    doors = of_server(TEMPLATE, penalty)
    del doors["/v1/responses"]  # OpenAI's API has no such field.
    for door, tokens in doors.items():
        assert tokens == expected[: len(tokens)], door
    assert expected != of_command_line(tmp_path, TEMPLATE, {"temperature": 0.0})


@pytest.mark.parametrize("parallel", [1, 4])
async def test_a_server_keeps_of_a_long_prompt_what_a_session_keeps(parallel: int) -> None:
    """A server evicts as many entries of a long prompt as a session, and writes the same answer,
    because it reads the prompt in the same pieces.
    """
    text = "The old garden was heavy all morning. Simon likes walnuts. " * 24
    cache = {**CACHE, "kv_budget": str(48 * parallel), "kv_type": "q8_0", "learn": False}
    with contextlib.ExitStack() as stack:
        if parallel == 1:
            session = stack.enter_context(Session(MODEL, **cache))
        else:
            session = stack.enter_context(Pool(MODEL, n_sequences=parallel, **cache)).session()
        tokens = session.tokenize(text)
        assert len(tokens) > 4 * 48
        written = list(session.generate(tokens, N, temperature=0.0, min_tokens=N))
        expected = [*tokens, *written][:-1], session.stats().evictions

    app = create_app(ModelOptions(model=str(MODEL), parallel=parallel, **cache), ServerOptions())
    async with client_of(app) as client:
        body = {"prompt": text, "max_tokens": N, "min_tokens": N, "temperature": 0.0}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        engine = app.state.engine
        tokens_read, n_evicted = engine.lanes[0].latest.tokens, engine.stats.evictions
    engine.close()
    assert tokens_read == expected[0][: len(tokens_read)]
    assert n_evicted == expected[1]
    assert n_evicted > 0


def test_seeds_give_other_tokens(tmp_path: Path) -> None:
    """Another seed gives another answer, so that the comparisons above can fail."""
    one, other = (
        of_command_line(tmp_path, TEMPLATE, {"temperature": 1.3, "seed": seed}) for seed in (11, 12)
    )
    assert one != other

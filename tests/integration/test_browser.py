"""The page of the server works in a real browser: chat, cache, and errors."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entropykv.model import shipped
from tests.support.browser import Watched, chromium
from tests.support.kv_events import events
from tests.support.running_server import KEY, Server
from tests.support.served import served
from tests.support.several_models import write_models
from tests.support.tiny_models import write_llama

pytestmark = pytest.mark.browser
DEMO = shipped.DEMOS["bitnet"]
CONTEXT: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
GONE = "net::ERR_"
REFUSED = "status of 401"
LOADING = "status of 503"
ENDLESS = 1 << 20
"""The context of a server whose answer must not end by itself: the model writes 750 tokens a
second, and a busy machine may need minutes to show what a test waits for.
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    usual = ("--kv-budget", 256, "--n_ctx", ENDLESS, "-t", 1)
    yield from served("--freeze", "ram", usual=usual)


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Watched]:
    watched = Watched(browser, server.url, **CONTEXT)
    yield watched
    watched.check(LOADING)


def test_a_document_and_a_question_about_it(page: Watched) -> None:
    page.settings(Temperature=0, Longest_answer=8)
    page.page.set_input_files("input[type=file]", str(DEMO.document))
    page.ask(DEMO.question)
    page.finished()
    (answer,) = page.answers()
    assert answer
    assert "tokens" in page.page.locator("article.answer small").inner_text()
    assert page.page.locator(".bubble .chip").inner_text().startswith("bitnet-facts.txt")
    page.page.get_by_role("button", name="Answer again").click()
    page.finished()
    assert page.answers() == [answer], "greedy answers to one request differ"


def test_a_dropped_file_is_read_once_watched_and_asked(browser: Any, tmp_path: Path) -> None:
    """A dropped file is read once, and answers about it show their passages; a second conversation,
    on a page that was loaded again, can ask about it, too.
    """
    keep = tmp_path / "kept"
    usual = ("-c", 16384, "-t", 1, "--kv-budget", 4096, "--policy", "adaptive")
    with Server("--documents", keep, usual=usual) as running:
        page = Watched(browser, running.url, **CONTEXT)
        page.settings(Temperature=0, Longest_answer=4)
        text = DEMO.document.read_text(encoding="utf-8")
        drop(page, "The old book.txt", text * 7)
        chip = page.page.get_by_role("group", name="Document The-old-book")
        chip.get_by_role("progressbar").wait_for()
        page.ask(DEMO.question)  # The answer waits until the document is read.
        page.finished()
        assert page.answers()[0]
        page.page.get_by_text("Passages that this answer looked at").click()
        assert "% of what this answer looked at" in page.page.locator(".passages").inner_text()
        assert page.page.locator(".holders").count() == 0, "a document and its chat are one"
        assert names_of_figures(page)[:2] == ["Tokens", "Entries held"]
        marks = page.page.locator(".passages mark").all_inner_texts()
        assert len(marks) == 4
        assert all(squeezed(mark) in squeezed(text * 7) for mark in marks)
        chip.get_by_role("progressbar").wait_for(state="detached")
        assert "tokens read" in chip.inner_text()
        assert not page.page.locator(".bubble .chip").count(), "the text was sent with the question"
        read = figures(running)["prompt_tokens"]
        page.page.reload()
        page.page.get_by_role("button", name="New conversation").click()
        page.page.get_by_role("button", name="Ask The-old-book").click()
        page.ask("Who lives at the harbour?")
        page.finished()
        assert figures(running)["prompt_tokens"] - read < 60
        assert not page.findings()
        page.check()


@pytest.mark.parametrize("policy", ["auto", "streaming"])
def test_an_answer_whose_attention_was_not_measured_says_why_it_has_no_passages(
    browser: Any, tmp_path: Path, policy: str
) -> None:
    """An answer without passages says why: policy `auto` ranks by predictions of the shipped
    model's profile, and `streaming` by positions, so that neither measures attention.
    """
    usual = ("-c", 4096, "-t", 1, "--kv-budget", 1024, "--policy", policy)
    with Server("--documents", tmp_path, usual=usual) as running:
        page = Watched(browser, running.url, **CONTEXT)
        page.settings(Temperature=0, Longest_answer=4)
        drop(page, "book.txt", DEMO.document.read_text(encoding="utf-8"), on="main.chat")
        page.page.get_by_role("group", name="Document book").wait_for()
        page.ask(DEMO.question)
        page.finished()
        assert page.answers()[0]
        said = page.page.locator(".passages").inner_text()
        assert "does not measure what an answer looks at" in said
        page.check()


def squeezed(text: str) -> str:
    """Return a text with one space between words, as a browser shows it."""
    return " ".join(text.split())


def drop(page: Watched, name: str, text: str, on: str = "form.composer") -> None:
    """Drop a text file on the element that the CSS selector `on` finds."""
    transfer = page.page.evaluate_handle(
        """([name, text]) => {
            const data = new DataTransfer();
            data.items.add(new File([text], name, { type: "text/plain" }));
            return data;
        }""",
        [name, text],
    )
    page.page.dispatch_event(on, "drop", {"dataTransfer": transfer})


def names_of_figures(page: Watched) -> list[str]:
    page.page.locator(".budget dd").nth(3).wait_for()
    return [str(name) for name in page.page.locator(".budget dt").all_inner_texts()]


def figures(server: Server) -> Any:
    return server.kv()


def write_on(route: Any) -> None:
    """Change a request so that its answer goes on until it is stopped."""
    asked = route.request.post_data_json
    most = ENDLESS // 2
    route.continue_(post_data=json.dumps(asked | {"max_tokens": most, "min_tokens": most}))


def test_stop_edit_and_answers_again(page: Watched) -> None:
    page.page.route("**/v1/chat/completions", write_on)
    page.ask("The old garden")
    page.page.locator(".markdown").wait_for()
    page.page.get_by_role("button", name="Stop").click()
    page.finished()
    assert "stopped" in page.page.locator("article.answer small").inner_text()
    page.page.unroute("**/v1/chat/completions")
    page.settings(Longest_answer=4)
    page.page.get_by_label("Your message").press("ArrowUp")
    field = page.page.get_by_label("Edit this turn")
    assert field.input_value() == "The old garden"
    field.fill("In the harbour")
    field.press("Enter")
    page.finished()
    assert page.page.locator(".plain").all_inner_texts() == ["In the harbour"]
    assert "cut off" in page.page.locator("article.answer small").inner_text()


def test_what_is_typed_before_the_page_is_painted_is_kept(page: Watched) -> None:
    """What is typed into a new field before the page is painted is kept; on a busy machine,
    painting may take long.
    """
    page.settings(Longest_answer=4)
    page.ask("The old garden")
    page.finished()
    page.page.evaluate("""async () => {
        const press = (field, key) =>
            field.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        press(document.querySelector(".composer textarea"), "ArrowUp");
        await null;  // A task of the page redraws it; painting comes after this script.
        const field = document.querySelector(".edited textarea");
        field.value = "In the harbour";
        field.dispatchEvent(new Event("input", { bubbles: true }));
    }""")
    field = page.page.get_by_label("Edit this turn")
    page.page.wait_for_timeout(300)
    assert field.input_value() == "In the harbour"
    field.press("Enter")
    page.finished()
    assert page.page.locator(".plain").all_inner_texts() == ["In the harbour"]


def test_settings_and_files_given_before_the_server_has_said_its_own_are_kept(
    browser: Any, tmp_path: Path
) -> None:
    with Server(
        "--documents", tmp_path, usual=("-c", 4096, "-t", 1, "--kv-budget", 1024)
    ) as running:
        page = Watched(browser, running.url, **CONTEXT)
        late: list[Any] = []

        def delay(route: Any) -> None:
            late.append(route)

        page.page.route("**/v1/web/defaults", delay)
        page.page.reload()
        page.settings(Longest_answer=4, System_prompt="Be short.")
        drop(page, "book.txt", DEMO.document.read_text(encoding="utf-8"))
        page.page.wait_for_timeout(300)
        for route in late:
            route.continue_()
        page.page.get_by_role("group", name="Document book").wait_for()
        page.page.get_by_role("button", name="Settings").click()
        assert page.page.get_by_label("Longest answer").input_value() == "4"
        assert page.page.get_by_label("System prompt").input_value() == "Be short."
        page.check()


def test_two_conversations_outlive_a_reload(page: Watched) -> None:
    page.settings(Longest_answer=4, System_prompt="Be short.")
    for text in ("The old garden", "A quiet market"):
        page.page.get_by_role("button", name="New conversation").first.click()
        page.ask(text)
        page.finished()
    kept = page.answers()
    page.page.wait_for_timeout(500)
    page.page.reload()
    assert page.page.locator(".conversations .title").all_inner_texts() == [
        "A quiet market",
        "The old garden",
    ]
    assert page.answers() == kept
    page.page.get_by_role("button", name="The old garden", exact=True).click()
    assert page.page.locator(".plain").all_inner_texts() == ["The old garden"]
    page.page.get_by_role("button", name="Settings").click()
    assert page.page.get_by_label("System prompt").input_value() == "Be short."
    page.page.get_by_role("button", name="Cancel").click()
    page.page.once("dialog", lambda dialog: dialog.accept())
    page.page.get_by_role("button", name="Delete “The old garden”").click()
    assert page.page.locator(".conversations .title").count() == 1


def test_answers_cannot_do_anything(page: Watched) -> None:
    evil = (
        "<img src=x onerror=alert(1)> ![a](http://127.0.0.9/x.png) [b](javascript:alert(1)) **c**"
    )
    chunk = {"choices": [{"delta": {"content": evil}, "finish_reason": None}]}
    page.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
        ),
    )
    page.ask("x")
    page.finished()
    markdown = page.page.locator(".markdown")
    assert markdown.locator("strong").inner_text() == "c"
    assert markdown.locator("img, script, [onerror], a[href^='javascript']").count() == 0


def test_the_cache_is_shown_and_can_be_pointed_at(page: Watched) -> None:
    page.settings(Longest_answer=4)
    page.page.set_input_files("input[type=file]", str(DEMO.document))
    page.ask(DEMO.question)
    page.finished()
    assert "of 432 KiB" in page.page.locator(".budget h2").inner_text()
    surface = page.page.get_by_role("slider", name="Position in the text")
    surface.focus()
    page.page.keyboard.press("Home")
    page.page.keyboard.press("ArrowRight")
    readout = page.page.locator(".readout")
    readout.get_by_text("of 12 heads").wait_for()
    position = int(re.findall(r"Position ([\d,]+)", readout.inner_text())[0].replace(",", ""))
    told = json.loads(page.page.request.get(f"{page.url}/v1/kv/text?first={position}").text())
    assert f"held by {told['held'][0]} of 12 heads" in readout.inner_text()
    page.page.keyboard.press("+")
    page.page.get_by_role("button", name="Show the whole text").wait_for()
    page.page.keyboard.press("0")
    shaded = page.page.locator(".tokens .t")
    shaded.nth(100).wait_for(state="attached")  # The text is shown after the map of the cache.
    shaded.nth(3).click()
    page.page.locator(".t.pointed").wait_for()


def test_the_text_of_a_conversation_that_has_just_ended_is_asked_for_once(
    page: Watched, server: Server
) -> None:
    """The page asks only once for the text of a conversation that has ended, though pictures of it
    still come.
    """
    page.settings(Longest_answer=4)
    page.ask("The old garden")
    page.finished()
    sent = dict(events(server, most=2))
    (holder,) = sent["kv"]["conversations"]
    last = {**sent["kv"], "conversations": [{**holder, "id": "9"}], "map": None}
    looks = page.shows_instead(sent["model"], [last])
    asked: list[str] = []

    def ask_for_one_that_has_ended(route: Any) -> None:
        asked.append(route.request.url)
        route.continue_()

    page.page.route("**/v1/kv/text*", ask_for_one_that_has_ended)
    page.page.reload()
    page.page.get_by_role("heading", name="Text of a conversation that has ended").wait_for()
    seen = len(looks)
    while len(looks) < seen + 2:  # Later pictures must not make the page ask again.
        page.page.wait_for_event("response", lambda response: "kv/stream" in response.url)
    assert len(asked) == 1
    assert "conversation=9" in asked[0]


def test_the_map_keeps_its_place_where_the_page_changes(page: Watched) -> None:
    """Pointing at the map does not move it, and the mark follows when the page changes its size."""
    page.settings(Longest_answer=4)
    page.page.set_input_files("input[type=file]", str(DEMO.document))
    page.ask(DEMO.question)
    page.finished()
    surface = page.page.get_by_role("slider", name="Position in the text")
    for width in (1440, 1100, 390):
        page.page.set_viewport_size({"width": width, "height": 900})
        if width == 390:
            page.page.get_by_role("button", name="Cache", exact=True).click()
        surface.scroll_into_view_if_needed()
        before = surface.bounding_box()
        page.page.mouse.move(before["x"] + 200, before["y"] + 30)
        page.page.wait_for_function(
            """x => {
                const { left } = document.querySelector(".pointer").getBoundingClientRect();
                return Math.abs(left - x) < 4;
            }""",
            arg=before["x"] + 200,
        )
        page.page.locator(".readout mark").wait_for()
        assert surface.bounding_box()["height"] == before["height"]
    page.page.set_viewport_size({"width": 700, "height": 900})
    after, mark = surface.bounding_box(), page.page.locator(".pointer").bounding_box()
    labels = 44
    shares = (
        (200 - labels) / (before["width"] - labels),
        (mark["x"] - after["x"] - labels) / (after["width"] - labels),
    )
    assert abs(shares[0] - shares[1]) < 0.02


def test_what_is_not_read_yet_has_no_map_and_can_be_dropped_on_the_page(browser: Any) -> None:
    with Server() as server:
        page = Watched(browser, server.url, **CONTEXT)
        page.page.get_by_text("Nothing has been read yet.").wait_for()
        assert page.page.get_by_role("slider").count() == 0
        page.page.get_by_text("Drop a text file here").wait_for()
        page.check(LOADING)


def test_names_of_policies_are_shown_to_their_end(browser: Any) -> None:
    with Server("--policy", "adaptive:attention+values+echo") as server:
        page = Watched(browser, server.url, **CONTEXT)
        name = page.page.locator(".budget .policy", has_text="adaptive:attention+values+echo")
        name.wait_for()
        assert name.evaluate("e => e.scrollWidth <= e.clientWidth")
        page.check(LOADING)


def one_answered(page: Watched, server: Server) -> tuple[Any, Any, Any]:
    """Ask a question; return what the server sends then: model, state, and one conversation."""
    page.settings(Longest_answer=4)
    page.ask(DEMO.question)
    page.finished()
    (_, model), (_, now) = events(server, most=2)
    return model, now, now["conversations"][0]


def test_no_curve_crosses_a_time_in_which_nothing_happened(page: Watched, server: Server) -> None:
    """No curve crosses a time in which nothing happened, for which the server has sent nothing."""
    model, now, holder = one_answered(page, server)
    begun = time.time() - 100

    def picture(seconds: float, tokens: int) -> dict[str, Any]:
        each = holder | {"generated_tokens": tokens, "decode_seconds": tokens / 100}
        return now | {"time": begun + seconds, "conversations": [each], "map": None}

    wrote = [picture(10 + i / 4, 100 + 25 * i) for i in range(8)]
    later = [picture(90 + i / 4, 300 + 25 * i) for i in range(8)]
    page.shows_instead(model, [*wrote, *later])
    page.page.reload()
    chart = page.page.locator("figure.chart", has_text="Tokens per second")
    chart.get_by_text("written 100").wait_for()
    painted = chart.locator("canvas").evaluate("""canvas => {
        const colour = getComputedStyle(document.documentElement)
            .getPropertyValue("--speed-written").trim();
        const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        const columns = new Set();
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 99 && wanted.every((each, at) => Math.abs(data[i + at] - each) < 40))
                columns.add(Math.floor(((i / 4) % width) / width * 20));
        return [...columns].sort((a, b) => a - b);
    }""")
    assert painted, "nothing was drawn"
    assert not set(painted) & set(range(8, 16)), painted


def test_a_document_that_is_read_in_long_steps_has_its_true_speed(
    page: Watched, server: Server
) -> None:
    """The speed of a document that is read in steps of several seconds is right, though the server
    sends nothing within a step.
    """
    model, now, holder = one_answered(page, server)
    begun = time.time() - 100

    def picture(i: int) -> dict[str, Any]:
        each = holder | {"document": True, "state": "active", "position": 150 * i}
        return now | {"time": begun + 5 * i, "conversations": [each], "map": None}

    page.shows_instead(model, map(picture, range(1, 8)))
    page.page.reload()
    chart = page.page.locator("figure.chart", has_text="Tokens per second")
    chart.get_by_text("read 30").wait_for()


def test_a_page_that_is_slower_than_its_server_does_not_fall_behind(
    page: Watched, server: Server
) -> None:
    """Of 2,000 pictures that have all come, the page shows the newest, and few of the others."""
    server.post("/v1/completions", json.dumps({"prompt": "The old garden", "max_tokens": 1}))
    (_, model), (_, now) = events(server, most=2)
    assert now["map"] is not None
    each = next(holder for holder in now["conversations"] if holder["id"] == now["map"]["id"])

    def picture(i: int) -> dict[str, Any]:
        holder = each | {"position": 10_000 + i, "generated_tokens": i}
        return now | {"time": now["time"] + i / 4, "conversations": [holder]}

    page.shows_instead(model, map(picture, range(2000)))
    page.page.add_init_script("""
        window.shown = new Set();
        const note = () => window.shown.add(document.querySelector(".budget dd")?.textContent);
        const watched = { subtree: true, childList: true, characterData: true };
        new MutationObserver(note).observe(document, watched);
    """)
    page.page.reload()
    page.page.locator(".budget dd", has_text="11,999").first.wait_for()
    assert page.page.evaluate("window.shown.size") < 200


def test_a_stream_that_ends_is_followed_by_the_next_without_a_gap(page: Watched) -> None:
    """The page opens the next stream as soon as one ends; replicas end each stream after some
    seconds, so that Ray can stop them.
    """
    seconds = 4
    asked: list[float] = []

    def shorten(route: Any) -> None:
        asked.append(time.monotonic())
        route.continue_(url=f"{route.request.url}&seconds={seconds}")

    page.page.route("**/v1/kv/stream*", shorten)
    page.page.reload()
    # The first stream belongs to no conversation; it lasts until the map is shown.
    page.page.wait_for_timeout(1000)
    gaps: list[float] = []
    deadline = time.monotonic() + 60
    while len(gaps) < 3:
        assert time.monotonic() < deadline
        page.page.wait_for_timeout(200)
        gaps = [after - before - seconds for before, after in itertools.pairwise(asked[1:])]
    assert min(gaps) < 1


def test_streams_that_end_at_once_are_not_asked_for_all_the_time(page: Watched) -> None:
    asked: list[float] = []

    def end(route: Any) -> None:
        asked.append(time.monotonic())
        route.fulfill(body="", content_type="text/event-stream")

    page.page.route("**/v1/kv/stream*", end)
    page.page.reload()
    page.page.wait_for_timeout(6500)
    assert 2 <= len(asked) <= 6


def test_the_cache_is_asked_for_by_the_name_of_the_chat(page: Watched) -> None:
    """The page asks for the cache by the name of its chat, so that of several replicas the one that
    answers shows its cache.
    """
    names: dict[str, list[str]] = {"completions": [], "stream": [], "text": []}

    def note(request: Any) -> None:
        for route, seen in names.items():
            if f"/{route}" in request.url.partition("?")[0]:
                seen.append(request.headers.get("x-session-id", ""))

    page.page.on("request", note)
    page.settings(Longest_answer=4)
    for text in ("The old garden", "A quiet market"):
        page.page.get_by_role("button", name="New conversation").first.click()
        page.ask(text)
        page.finished()
        page.page.locator(".tokens .t").first.wait_for(state="attached")
        asked = {route: seen[-1:] for route, seen in names.items()}
        assert asked["completions"][0]
        assert asked["stream"] == asked["completions"]
    deadline = time.monotonic() + 30
    while names["text"][-1:] != names["completions"][-1:]:
        assert time.monotonic() < deadline
        page.page.wait_for_timeout(200)


def test_a_wrong_key_is_asked_for_again(browser: Any) -> None:
    with Server(ENTROPYKV_API_KEY=KEY) as server:
        watched = Watched(browser, server.url, **CONTEXT)
        for key, says in (("wrong", "wants its API key"), (KEY, "refuses this key")):
            dialog = watched.page.get_by_role("dialog")
            dialog.get_by_text(says).wait_for()
            dialog.get_by_role("textbox").fill(key)
            dialog.get_by_role("button").click()
        watched.page.get_by_text("bitnet-facts.gguf").wait_for()
        watched.settings(Longest_answer=4)
        watched.ask("The old garden")
        watched.finished()
        assert KEY not in watched.page.evaluate("JSON.stringify(localStorage)")
        assert KEY in watched.page.evaluate("JSON.stringify(sessionStorage)")
        watched.check(REFUSED, LOADING)


@pytest.mark.parametrize("options", [("--parallel", 2), ()], ids=["pool", "one"])
def test_a_user_sees_the_own_key_s_conversations_and_no_text_unless_it_is_shown(
    browser: Any, tmp_path: Path, options: tuple[object, ...]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nanother-key\n", encoding="utf-8")
    with Server(*options, "--api-key-file", keys) as server:
        body = {"prompt": "A quiet market. " * 90, "max_tokens": 4, "user": "ben"}
        watched = Watched(browser, server.url, **CONTEXT)
        dialog = watched.page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill("another-key")
        server.post("/v1/completions", json.dumps(body))
        dialog.get_by_role("button").click()
        watched.page.get_by_text("Nothing of yours is in the cache.").wait_for()
        watched.settings(Longest_answer=4)
        watched.ask("The old garden")
        watched.finished()
        watched.page.get_by_text("This server does not show what texts say").wait_for()
        watched.page.get_by_role("slider", name="Position in the text").wait_for()
        holders = watched.page.locator(".holders tbody tr")
        assert holders.count() == (1 if options else 0)
        assert "ben" not in watched.page.locator(".panel").inner_text()
        assert watched.findings() == []
        watched.check(REFUSED, LOADING)


def test_the_server_goes_and_comes_back(browser: Any) -> None:
    with Server() as server:
        watched = Watched(browser, server.url, **CONTEXT)
        watched.settings(Longest_answer=4)
        watched.page.get_by_text("of 432 KiB").wait_for()
        port = int(server.url.rpartition(":")[2])
    watched.ask("The old garden")
    watched.page.get_by_text("The server does not answer. Trying again…").wait_for()
    with Server(port=port):
        watched.page.locator(".notice").wait_for(state="hidden")
        watched.page.get_by_role("button", name="Answer again").click()
        watched.finished()
        assert watched.answers()
        watched.page.get_by_text("12 of 12 heads").or_(
            watched.page.locator(".tokens .t")
        ).first.wait_for()
        watched.check(GONE, LOADING)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [CONTEXT, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_serious(
    browser: Any, server: Server, scheme: str, size: dict[str, Any]
) -> None:
    watched = Watched(browser, server.url, color_scheme=scheme, **size)
    watched.settings(Longest_answer=4)
    watched.ask("The old garden")
    watched.finished()
    assert watched.findings() == []
    if size is PHONE:
        watched.page.get_by_role("button", name="Cache", exact=True).click()
        watched.page.get_by_role("slider").wait_for()
        assert watched.findings() == []
    watched.page.get_by_role("button", name="Settings").click()
    assert watched.findings() == []
    watched.check(LOADING)


def test_a_pool_shows_who_costs_whom_what(browser: Any) -> None:
    with Server(
        "--parallel", 2, usual=("--kv-budget", "512KiB", "--n_ctx", ENDLESS, "-t", 1)
    ) as server:
        watched = Watched(browser, server.url, **CONTEXT)
        page = watched.page
        page.get_by_text("Nothing has been read yet.").wait_for()
        page.route("**/v1/chat/completions", write_on)
        page.set_input_files("input[type=file]", str(DEMO.document))
        watched.ask(DEMO.question)
        page.locator(".markdown").wait_for()
        assert names_of_figures(watched)[:2] == ["Tokens", "Entries held"]
        holders = page.locator(".holders tbody tr")
        assert holders.count() == 0, "one conversation shares with nobody"
        body = {"prompt": "A quiet market. " * 90, "max_tokens": 4, "user": "ben"}
        server.post("/v1/completions", json.dumps(body))
        watched.wait_for(holders.filter(has_text="writes"))
        assert DEMO.question in holders.first.inner_text()
        assert names_of_figures(watched)[0] == "In the pool"
        own = page.locator(".holders tr.chosen")
        given_up = own.locator("td").last
        given_up.filter(has_text=re.compile(r"\d")).wait_for()
        assert int(given_up.inner_text().replace(",", "")) > 0
        page.get_by_role("slider", name="Position in the text").wait_for()
        page.get_by_role("button", name="Stop").click()
        watched.finished()
        ben = page.locator(".holders").get_by_role("button", name="ben")
        ben.focus()
        page.keyboard.press("Enter")
        page.locator(".tokens", has_text="A quiet market").wait_for()
        server.post("/v1/completions", json.dumps({**body, "user": "cleo"}))
        page.locator(".holders tr.swapped_out", has_text="ben").wait_for()
        page.get_by_text("Swapped out: others needed the room.").wait_for()
        page.get_by_text("of swapped out texts lie outside of the budget").wait_for()
        assert watched.findings() == []
        watched.check(LOADING)


def test_a_chat_of_two_turns_is_one_conversation(browser: Any) -> None:
    """A chat of two turns is one conversation, though the model has no chat template, and its
    answer begins with a space, which is sent back.
    """
    with Server("--parallel", 3, usual=("--kv-budget", "1MiB", "-c", 2048, "-t", 1)) as server:
        watched = Watched(browser, server.url, **CONTEXT)
        watched.settings(Temperature=0, Longest_answer=8)
        for text in ("Tell me about the sea and the ships.", "And the wind?"):
            watched.ask(text)
            watched.finished()
        metrics = server.get("/metrics").text
        assert "entropykv_resumed_total 1" in metrics
        assert "entropykv_forked_total 0" in metrics
        assert len(server.kv()["conversations"]) == 1
        watched.check(LOADING)


def test_a_hundred_thousand_positions(browser: Any, tmp_path: Path) -> None:
    model = tmp_path / "long.gguf"
    write_llama(model, n_layer=1, n_head=2, n_head_kv=2, head_dim=16, weight_type="F32")
    with Server(
        model=model, usual=("--n_ctx", 131072, "--kv-budget", 128, "-t", 1, "-b", 512)
    ) as server:
        watched = Watched(browser, server.url, **CONTEXT)
        tokens = [7 + i % 90 for i in range(100_000)]
        server.post("/v1/completions", json.dumps({"prompt": tokens, "max_tokens": 1}))
        watched.page.locator(".budget dd", has_text="100,00").first.wait_for()
        surface = watched.page.get_by_role("slider")
        box = surface.bounding_box()
        start = time.monotonic()
        for step in range(20):
            watched.page.mouse.move(box["x"] + 60 + 20 * step, box["y"] + 40)
        watched.page.locator(".readout", has_text="of 2 heads").wait_for()
        assert time.monotonic() - start < 20
        assert int(surface.get_attribute("aria-valuemax")) >= 99_999
        watched.check(LOADING)


def test_the_page_of_several_models_lets_its_user_choose(browser: Any, tmp_path: Path) -> None:
    write_models(tmp_path, "one", "two")
    options = ("--models-dir", tmp_path, "-c", 512, "--kv-budget", 128, "-t", 1)
    with Server(model=None, usual=options) as server:
        watched = Watched(browser, server.url, **CONTEXT)
        page = watched.page
        page.get_by_text("The model is not in memory.").wait_for()
        chooser = page.get_by_label("Model", exact=True)
        assert chooser.locator("option").all_inner_texts() == ["one", "two"]
        chooser.select_option("two")
        watched.settings(Longest_answer=4)
        watched.ask("The old garden")
        watched.finished()
        page.locator(".budget dd").first.wait_for()
        states = {
            each["id"]: each["status"]["value"] for each in server.get("/v1/models").json()["data"]
        }
        assert states == {"one": "unloaded", "two": "loaded"}
        assert watched.findings() == []
        page.reload()
        page.locator(".budget dd").first.wait_for()
        assert page.get_by_label("Model", exact=True).input_value() == "two"
        watched.check(LOADING, "status of 400")

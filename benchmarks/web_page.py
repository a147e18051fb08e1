"""Measure what the web page costs: the server with a viewer, and the browser at 128k positions.

PYTHONPATH=. python benchmarks/web_page.py [-m MODEL]

1. A server of one conversation, and one of a pool of four, write blocks of tokens, in alternation
   with and without a viewer of the cache; ratios are of the medians of one run.
2. The time that a picture takes in the model's thread, by entries (32 layers of 8 KV heads).
3. Frames per second and CPU of the page in Chromium, while 32 x 8 KV heads over 131,072 positions
   change four times a second, and the mouse moves over them (needs entropykv[browser]).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import random
import shutil
import statistics
import tempfile
import threading
import time
import timeit
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from entropykv import Session
from entropykv.server.page.files import page_file, page_files
from inputs import find_model
from tests.support.running_server import Server
from tests.support.tiny_models import write_llama

LAYERS, HEADS, POSITIONS = 32, 8, 131_072
ROUNDS, BLOCK = 12, 48
SECONDS = 12


@contextmanager
def viewer(url: str) -> Iterator[list[int]]:
    """View the cache during the `with` block; yield a list that holds the number of received bytes
    at the end.
    """
    received, stop = [0], threading.Event()

    def watch() -> None:
        with httpx.stream("GET", f"{url}/v1/kv/stream?columns=1024", timeout=60) as answer:
            for part in answer.iter_raw():
                received[0] += len(part)
                if stop.is_set():
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    yield received
    stop.set()
    thread.join()


@dataclass(frozen=True)
class Block:
    """Hold the server's figures for a block of tokens of every conversation."""

    speed: float
    """Tokens per second, of all conversations together."""
    cpu: float
    """CPU seconds per token, of all threads of the server."""


def write_block(server: Server, n_conversations: int, turn: int) -> Block:
    """Let every conversation continue its prompt by a block of tokens; return the figures."""
    process = psutil.Process(server.process.pid)

    def write(number: int) -> None:
        text = f"{number} The lighthouse keeper climbed the stairs, and looked at the sea. " * 120
        body = {"prompt": text + " " * (turn % 3), "max_tokens": BLOCK, "min_tokens": BLOCK}
        body |= {"temperature": 0, "user": f"user {number}"}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=900).raise_for_status()

    before, start = process.cpu_times(), time.perf_counter()
    with ThreadPoolExecutor(n_conversations) as threads:
        list(threads.map(write, range(n_conversations)))
    seconds, after = time.perf_counter() - start, process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    tokens = n_conversations * BLOCK
    return Block(tokens / seconds, spent / tokens)


def watched_ratio(model: Path, n_conversations: int) -> None:
    """Print the cost of tokens with a viewer of the cache, relative to that without one."""
    parallel = ("--parallel", n_conversations) if n_conversations > 1 else ()
    budget = ("-c", 8192, "--kv-budget", 512 * n_conversations)
    server = Server(*parallel, model=model, usual=(*budget, "-t", 1))
    try:
        write_block(server, n_conversations, 0)
        blocks: dict[bool, list[Block]] = {False: [], True: []}
        for turn in range(2 * ROUNDS):
            watched = turn % 2 == 1
            if watched:
                with viewer(server.url) as received:
                    blocks[True].append(write_block(server, n_conversations, turn))
            else:
                blocks[False].append(write_block(server, n_conversations, turn))
    finally:
        server.end()
    (alone, alone_cpu), (seen, seen_cpu) = (
        (statistics.median(b.speed for b in some), statistics.median(b.cpu for b in some))
        for some in (blocks[False], blocks[True])
    )
    print(
        f"{n_conversations} conversations: {alone:.1f} tokens a second without a viewer, "
        f"{seen:.1f} with one: {seen / alone:.3f}x; {1e3 * alone_cpu:.2f} ms of CPU for a token, "
        f"{1e3 * seen_cpu:.2f} with one: {seen_cpu / alone_cpu:.3f}x; the last viewer got "
        f"{received[0] / 1024:.0f} KiB"
    )


def look_cost() -> None:
    """Print the time of a picture of the cache: as measured, per entry, and for POSITIONS / 5."""
    tokens = 2048
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "wide.gguf"
        write_llama(model, n_layer=LAYERS, n_head=HEADS, n_head_kv=HEADS, head_dim=16)
        with Session(model, n_ctx=tokens, n_threads=2) as session:
            chosen = random.Random(1)  # noqa: S311
            session.decode([chosen.randrange(5, 60) for _ in range(tokens)])
            look = session.cache.map()
            taken = partial(look, 0, 4, 512)
            seconds = min(timeit.repeat(taken, number=1, repeat=9, timer=time.thread_time))
            entries = session.stats().entries_kept
    each = seconds / entries
    share = POSITIONS // 5 * LAYERS * HEADS
    print(
        f"a look at {entries:,} entries: {1e3 * seconds:.1f} ms of CPU, {1e9 * each:.2f} ns each; "
        f"{1e3 * each * share:.0f} ms at a fifth of {LAYERS} x {HEADS} x {POSITIONS:,}"
    )


def picture(step: int, columns: int) -> dict[str, Any]:
    """Return a picture of the cache with the wanted number of columns; it differs at every step."""
    noise = np.random.default_rng(step)
    rows = LAYERS * HEADS
    held = (np.round(noise.random((rows, columns)) ** 6 * 16) * 15).astype(np.uint8)
    held[:, -columns // 10 :] = 255
    restored = (noise.random((rows, columns)) < 0.01).astype(np.uint8) * 40
    planes = np.stack([held, 255 - held, restored])
    counts = ("prompt_tokens", "generated_tokens", "evictions", "entries_frozen")
    figures = dict.fromkeys((*counts, "entries_restored", "entries_recalled"), 100 * step)
    figures |= dict.fromkeys(("prompt_seconds", "decode_seconds"), step / 4)
    figures |= {
        "entries": 6_700_000,
        "entries_full": rows * POSITIONS,
        "frozen_entries": 26_000_000,
    }
    figures |= dict.fromkeys(("budget", "bytes", "bytes_full", "frozen_bytes"), 2**31)
    figures |= {"name": None, "state": "active", "idle_seconds": 0, "given_up": 0}
    shape = {"rows": rows, "columns": columns, "first": 0, "per_column": POSITIONS // columns}
    data = base64.b64encode(zlib.compress(planes.tobytes(), 1)).decode()
    conversation = {
        "id": "0",
        "position": POSITIONS,
        "swapped_out": False,
        "swapped_bytes": 0,
        **figures,
    }
    pool = {"budget": 2**31, "used": 2**31, "peak": 2**31, "sequences": 1, "swapped_bytes": 0}
    return {
        "time": time.time(),
        "pool": pool,
        "requests": 1,
        "conversations": [conversation],
        "map": {"id": "0", **shape, "planes": data},
    }


async def stream(request: Request) -> StreamingResponse:
    """Stream four prepared pictures per second."""
    import asyncio  # noqa: PLC0415

    columns = int(request.query_params["columns"])
    made = [picture(step, columns) for step in range(8)]
    about = {"model": "128k", "store": "headwise", "policy": "auto", "kv_type": "q8_0"}
    about |= {"kv_budget": "0.2", "freeze": True, "n_ctx": POSITIONS, "layers": [HEADS] * LAYERS}
    about |= {"shared": False}

    async def events() -> Any:
        yield f"event: model\ndata: {json.dumps(about)}\n\n"
        step = 0
        while True:
            step += 1
            data = {**made[step % 8], "time": time.time()}
            yield f"event: kv\ndata: {json.dumps(data)}\n\n"
            await asyncio.sleep(0.25)

    return StreamingResponse(events(), media_type="text/event-stream")


async def answer(request: Request) -> Response:
    """Serve the page and its files, and answer its other requests with made-up contents."""
    path = request.url.path
    if path in page_files():
        return page_file(path, None)
    if path == "/v1/kv/text":
        texts = [" word"] * int(request.query_params["count"])
        counts = [7] * len(texts)
        about = {"position": POSITIONS, "first": int(request.query_params["first"]), "heads": 256}
        about["swapped_out"] = False
        return JSONResponse({**about, "texts": texts, "held": counts, "frozen": counts})
    params: dict[str, Any] = {"default_generation_settings": {"params": {}}}
    return JSONResponse({**params, "model": "128k", "sampling": {}, "system": None})


MEASURE = """async (seconds) => {
  const times = [];
  const end = performance.now() + 1000 * seconds;
  await new Promise((done) => {
    const frame = (now) => { times.push(now); now < end ? requestAnimationFrame(frame) : done(); };
    requestAnimationFrame(frame);
  });
  return times;
}"""


def page_speed() -> None:
    """Print frames per second of the page and the browser's CPU time, with the mouse still and
    moving over the map; without Chromium a note.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no Chromium: the page is not measured")
        return
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    routes = [Route("/v1/kv/stream", stream), Route("/{path:path}", answer)]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        surface = page.get_by_role("slider")
        surface.wait_for()
        box = surface.bounding_box()
        for moves in (False, True):
            before, start = busy_seconds(), time.perf_counter()
            gaps = np.diff(measured(page, box, moves=moves))
            seconds = time.perf_counter() - start
            busy = busy_seconds() - before
            print(
                f"page, mouse {'moving' if moves else 'still'}: {1000 / gaps.mean():.0f} frames a "
                f"second, half of them within {np.median(gaps):.0f} ms, 99 % within "
                f"{np.percentile(gaps, 99):.0f} ms; the browser takes {busy / seconds:.0%} of a "
                f"core, {1e3 * busy / (4 * seconds):.0f} ms a picture"
            )
        browser.close()
    server.should_exit = True
    server.force_exit = True
    thread.join(timeout=5)


def measured(page: Any, box: Any, *, moves: bool) -> list[float]:
    """Return the times of frames in milliseconds; with `moves`, while the mouse moves."""
    page.evaluate(f"window.frames_ = ({MEASURE})({SECONDS}); 0")
    end = time.perf_counter() + SECONDS
    step = 0
    while time.perf_counter() < end:
        if moves:
            step += 1
            page.mouse.move(box["x"] + 60 + 7 * step % 500, box["y"] + 10 + 3 * step % 200)
        page.wait_for_timeout(30)
    return list(page.evaluate("window.frames_"))


def busy_seconds() -> float:
    """Return the CPU seconds of the browser's processes and threads."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "chromium" in process.name():
                times = process.cpu_times()
                total += times.user + times.system
    return total


def main() -> None:
    """Print what the web page costs the server and the browser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model")
    options = parser.parse_args()
    look_cost()
    page_speed()
    for n_conversations in (1, 4):
        watched_ratio(Path(find_model(options.model)), n_conversations)


if __name__ == "__main__":
    main()

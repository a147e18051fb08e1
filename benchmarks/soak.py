"""Find out whether `entropykv serve -np` loses anything or grows, under many requests of many
clients.

python benchmarks/soak.py [--requests 2000] [--clients 32] [--freeze ram] [--hostile 0.05]

Every client holds one conversation after the other with the shipped BitNet model, which can recall
facts: the first turn states some, further turns are filler and answers of random lengths, and the
last turn asks for a fact of the first one. Clients abort some streams. There are more conversations
than sequences, so that they are swapped out, some of them to files, and together they need several
times the budget. With --freeze, evicted entries are kept, and facts should be known as with a
budget that holds everything (--kv-budget 1.0).

With --hostile, that share of the requests is what `make fuzz` sends to servers: invalid, much too
large, slow, or aborted (tests/fuzz/hostile.py). Other requests must lose nothing, every hostile
request must be answered or closed, and /health must always answer within a second.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from entropykv.model.shipped import DEMOS
from inputs import memory_mib
from servers import running_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fuzz.hostile import ATTACKS, Refused, Unanswered
from tests.fuzz.server_runs import watched
from training.facts import STOP, STOP_LINE, Writer

N_CTX = 1024
SECONDS = 300
"""The timeout of one request, in seconds."""
SAMPLES = 10
"""The number of times that memory is measured, at equal intervals of requests."""


@dataclass
class Tally:
    """Hold the outcomes of all requests, right answers about facts, times, and memory."""

    outcomes: Counter[str] = field(default_factory=Counter)
    hostile: Counter[str] = field(default_factory=Counter)
    """How often hostile requests had each outcome."""
    wrong: list[str] = field(default_factory=list)
    """Errors of the server that must never happen, whatever it receives."""
    right: int = 0
    asked: int = 0
    first: list[float] = field(default_factory=list)
    """The seconds to the first token of each answer."""
    rss: list[float] = field(default_factory=list)
    """The resident MiB of the server after each interval of requests."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def n_done(self) -> int:
        """Return the number of requests that have ended, with any outcome."""
        return sum(self.outcomes.values()) + sum(self.hostile.values())


class Client:
    """Hold the conversations of one client, one after the other."""

    def __init__(self, url: str, seed: int, options: argparse.Namespace, tally: Tally) -> None:
        """Use `seed` for all that is random."""
        self._http = httpx.Client(base_url=url, timeout=SECONDS)
        self._chance = random.Random(seed)  # noqa: S311
        self._attacks = random.Random(f"hostile {seed}")  # noqa: S311
        self._port = int(url.rpartition(":")[2])
        self._writer = Writer(f"soak {seed}")
        self._options = options
        self._tally = tally
        self._n = 0
        self._name = f"client {seed}"

    def live(self, more: Any) -> None:
        """Hold conversations as long as `more()` returns that another request is wanted."""
        while self._conversation(more):
            self._n += 1

    def _conversation(self, more: Any) -> bool:
        chance, n_turns = self._chance, self._chance.randint(2, 7)
        words, facts = self._writer.test_document(chance.randint(60, 200), 2)
        text = "".join([*words[1:-1], STOP])
        for _ in range(n_turns):
            if not self._is_wanted(more):
                return False
            text += self._answer(text, chance.randint(1, 24), leaves=chance.random() < 0.1)
            filler = [self._writer.filler() for _ in range(chance.randint(1, 8))]
            text += "".join("".join([*sentence, STOP]) for sentence in filler)
        if not self._is_wanted(more):
            return False
        fact = chance.choice(facts)
        question = text.removesuffix(STOP) + STOP_LINE + "".join(fact.question())
        answer = self._answer(question, 12, stop=[STOP])
        with self._tally.lock:
            self._tally.asked += 1
            self._tally.right += answer.strip() == "".join(fact.statement()).strip()
        return True

    def _is_wanted(self, more: Any) -> bool:
        """Tell whether another normal request is wanted; hostile requests are sent meanwhile."""
        while more():
            if self._attacks.random() >= self._options.hostile:
                return True
            self._attack()
        return False

    def _attack(self) -> None:
        attack = self._attacks.choice(ATTACKS)
        chance = random.Random(self._attacks.random())  # noqa: S311
        wrong = ""
        try:
            outcome = str(attack(chance, self._port))
        except (Unanswered, Refused, OSError) as error:
            outcome, wrong = type(error).__name__, f"{attack.__name__}: {error}"
        with self._tally.lock:
            self._tally.hostile[outcome] += 1
            self._tally.wrong += [wrong] if wrong else []

    def _answer(self, prompt: str, n_tokens: int, *, leaves: bool = False, **more: Any) -> str:
        """Stream an answer, and return its text; with `leaves`, the client may disconnect early."""
        body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "stream": True, **more}
        if self._n % 2:
            body["user"] = f"{self._name}, {self._n}"
        text, start, outcome = "", time.monotonic(), "lost"
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    outcome = str(answer.status_code)
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        outcome = "finished"
                    elif line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            outcome = "error"
                            break
                        if not text:
                            self._note_first(time.monotonic() - start)
                        text += chunk["choices"][0]["text"]
                        if leaves and self._chance.random() < 0.3:
                            outcome = "left"
                            break
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        with self._tally.lock:
            self._tally.outcomes[outcome] += 1
        return text

    def _note_first(self, seconds: float) -> None:
        with self._tally.lock:
            self._tally.first.append(seconds)


def soak(url: str, pid: int, options: argparse.Namespace) -> Tally:
    """Let all clients send --requests requests, hostile ones included; return the counts."""
    tally, begun, lock = Tally(), 0, threading.Lock()

    every = max(1, options.requests // SAMPLES)

    def more() -> bool:
        nonlocal begun
        with lock:
            if begun == options.requests:
                return False
            begun += 1
            if begun % every == 0:
                tally.rss.append(memory_mib(process=pid))
                print(f"{begun} requests, {tally.rss[-1]:.1f} MiB", file=sys.stderr, flush=True)
        return True

    with ThreadPoolExecutor(options.clients) as threads:
        clients = [Client(url, i, options, tally) for i in range(options.clients)]
        list(threads.map(lambda client: client.live(more), clients))
    return tally


def figures(url: str) -> dict[str, float]:
    """Return the server's metrics, by name and labels."""
    text = httpx.get(f"{url}/metrics", timeout=SECONDS).text
    found = re.findall(r"^entropykv_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def report(tally: Tally, found: dict[str, float], seconds: float) -> bool:
    """Print all results; return whether no request was lost and no error is in `tally.wrong`."""
    print(f"{tally.n_done} requests in {seconds:.0f} s: {dict(tally.outcomes)}")
    print(
        f"first token: median {statistics.median(tally.first):.2f} s, worst {max(tally.first):.2f}"
    )
    print("RSS in MiB: " + ", ".join(f"{mib:.1f}" for mib in tally.rss))
    print(f"facts of the first turn: {tally.right} of {tally.asked} answered word for word")
    names = ("resumed", "forked", "forgotten")
    shown = {name: int(found[f"{name}_total"]) for name in names}
    outcomes = {k: int(v) for k, v in found.items() if k.startswith("requests_total")}
    print(f"the server says: {shown}, {outcomes}, evictions {found.get('evictions_total', 0):.0f}")
    if tally.hostile:
        print(f"hostile requests: {dict(tally.hostile)}")
    for wrong in tally.wrong[:20]:
        print(f"wrong: {wrong}")
    return set(tally.outcomes) <= {"finished", "left"} and not tally.wrong


def main() -> None:
    """Start the server and the clients, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default=str(DEMOS["bitnet"].path))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("-np", "--parallel", type=int, default=8)
    parser.add_argument("--kv-budget", default="1000")
    parser.add_argument("--freeze", help="where evicted entries are kept")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--hostile", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "entropykv.cli", "serve", "-m", options.model]
        command += ["-c", str(N_CTX), "-t", str(options.threads), "-np", str(options.parallel)]
        command += ["--kv-budget", options.kv_budget, "--swap", f"disk:{directory}"]
        command += ["--conversations", str(2 * options.clients), "--log-requests", "false"]
        command += ["--freeze", options.freeze] if options.freeze else []
        with running_process(command) as (url, process):
            start = time.monotonic()
            with watched(int(url.rpartition(":")[2]), process.pid) as late:
                tally = soak(url, process.pid, options)
            tally.wrong += [f"/health: {text}" for text in late]
            fine = report(tally, figures(url), time.monotonic() - start)
    raise SystemExit(0 if fine else "some requests were lost")


if __name__ == "__main__":
    main()

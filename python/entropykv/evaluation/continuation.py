"""Compare continuations of a text, predicted or written greedily, against the full cache.

The prompt is read inside the budget, in micro-batches. Then there are two protocols: either the
budget grows by the length of the continuation (as in kvpress) and the true continuation is read
(teacher forcing), or the budget stays and the continuation is read token by token, as if it were
generated. After that, from the end of the prompt again, tokens are written greedily and compared
one by one.

Memory holds one model at a time, the logits of one micro-batch, and the reference's logits for the
same tokens, which are read from files (`References`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from entropykv.errors import ContextError, EntropyKVError
from entropykv.evaluation.metrics import Comparison, equal_share
from entropykv.evaluation.reading import (
    EvalPart,
    Item,
    Tick,
    Values,
    grow,
    kept_values,
    read,
    rows_of,
    write,
)
from entropykv.evaluation.stock import StockSession
from entropykv.evaluation.texts import Text
from entropykv.files import new_file
from entropykv.llamacpp.distributions import Logits
from entropykv.llamacpp.model import Model
from entropykv.session.session import Session

DEFAULT_PROMPT = 2048
_LEAST_PROMPT = 64


@dataclass(frozen=True)
class Protocol:
    """Hold the lengths of prompt, continuation and greedy text, in tokens.

    `inside`: the budget does not grow for continuation and greedy text. `greedy` 0: nothing is
    written.
    """

    prompt: int
    continuation: int = 256
    greedy: int = 64
    inside: bool = False

    @property
    def n_ctx(self) -> int:
        """Return the length of the longest sequence, in tokens."""
        return self.prompt + max(self.continuation, self.greedy)


@dataclass(frozen=True)
class ContinuedText(Item):
    """Hold a text, cut to the length of the prompt (`tokens`), and its true continuation."""

    following: tuple[int, ...]


def prompt_length(
    wanted: int | None, continuation: int, greedy: int, lengths: dict[str, int], n_ctx_train: int
) -> int:
    """Return the length of every prompt in tokens: the wanted one, or at most DEFAULT_PROMPT, as
    far as texts and context allow.

    `lengths`: the tokens of every text, by name. Raises ContextError if the prompt and what follows
    exceed the trained context, or a text, which the error names.
    """
    name, shortest = min(lengths.items(), key=lambda item: item[1])
    room = n_ctx_train - max(continuation, greedy)
    prompt = wanted or max(min(DEFAULT_PROMPT, shortest - continuation, room), _LEAST_PROMPT)
    if prompt > room:
        raise ContextError(
            f"a prompt of {prompt} tokens and what follows do not fit into the {n_ctx_train} that "
            f"the model was trained for; use a --prompt of {max(room, 1)} or fewer"
        )
    missing = prompt + continuation - shortest
    if missing > 0:
        raise ContextError(
            f"{name}: has {shortest} tokens, {missing} fewer than a prompt of {prompt} and a "
            f"continuation of {continuation}; leave it out, or lower --prompt or --continuation"
        )
    return prompt


class References:
    """Keep what stock llama.cpp predicts and writes after texts: for each, a file of logits
    (float32 rows) and one of tokens.

    They are in a temporary folder, or in `folder`, where an interrupted run leaves them for a later
    run. The caller makes sure that both runs have the same model and settings.
    """

    def __init__(self, n_vocab: int, n_texts: int, n_rows: int, folder: Path | None = None) -> None:
        """Make the folder, unless it exists, for `n_rows` rows of logits of each text; raises
        EntropyKVError if the disk lacks room, and OSError if the folder cannot be made.
        """
        self._n_vocab, self._n_bytes = n_vocab, 4 * n_vocab * n_rows
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="entropykv-eval-")
            folder = Path(self._temporary.name)
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = sum(file.stat().st_size for file in self._folder.iterdir())
        needed = self._n_bytes * n_texts - kept
        if shutil.disk_usage(self._folder).free < needed:
            self.close()
            raise EntropyKVError(
                f"{self._folder.parent}: the reference's logits need {needed / 2**20:.0f} MiB; "
                "make room, set TMPDIR or --resume to another folder, or use fewer texts"
            )

    def close(self) -> None:
        """Remove the folder if it is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def has(self, digest: str) -> bool:
        """Tell whether the two files of a text are there and complete; a machine that lost its
        power may have written half of them.
        """
        files = (self._tokens(digest), self._logits(digest))
        return all(file.exists() for file in files) and files[1].stat().st_size == self._n_bytes

    def write(self, digest: str, blocks: Iterator[Logits], greedy: Callable[[], list[int]]) -> None:
        """Write the logits of a text, given in blocks of rows, to its file, then the tokens that
        `greedy` returns.

        Raises EntropyKVError if a file cannot be written.
        """
        try:
            with open(self._logits(digest), "wb") as file:
                for block in blocks:
                    block.tofile(file)
            tokens = np.array(greedy(), np.int32)
            with new_file(self._tokens(digest)) as path:
                tokens.tofile(path)
        except OSError as error:
            raise EntropyKVError(
                f"{self._folder}: {error.strerror or error}; set TMPDIR or --resume to a folder "
                "with room"
            ) from None

    def rows(self, digest: str, first: int, n_rows: int) -> Logits:
        """Read `n_rows` rows of a text's logits from row `first` on: (n_rows, n_vocab)."""
        size = self._n_vocab
        values = np.fromfile(
            self._logits(digest), np.float32, count=n_rows * size, offset=4 * first * size
        )
        return values.reshape(n_rows, size)

    def greedy(self, digest: str) -> list[int]:
        """Read the tokens that stock llama.cpp writes after a text."""
        tokens: list[int] = np.fromfile(self._tokens(digest), np.int32).tolist()
        return tokens

    def _logits(self, digest: str) -> Path:
        return self._folder / f"{digest}.logits"

    def _tokens(self, digest: str) -> Path:
        return self._folder / f"{digest}.tokens"


class ContinuationPart(EvalPart):
    """Measure the continuations of all texts; the caller closes `references`."""

    name = "continuations"

    def __init__(
        self, items: Sequence[ContinuedText], protocol: Protocol, references: References
    ) -> None:
        """Use items that continued_texts() made with the same protocol."""
        self.items = items
        self.n_ctx = protocol.n_ctx
        self._protocol = protocol
        self._references = references

    def needs_reference(self, item: ContinuedText) -> bool:
        """Tell whether no earlier run has stored what stock predicts for this item."""
        return not self._references.has(item.digest)

    def reference(self, stock: StockSession, item: ContinuedText, tick: Tick) -> Values:
        """Store stock's logits and its greedy text for measure(); the returned figures are only
        tokens and seconds.
        """
        stock.reset()
        last, prompt_seconds = read(stock, item.tokens, tick)
        state = stock.files.save_state()
        values: Values = {"prompt_tokens": len(item.tokens), "prompt_seconds": prompt_seconds}

        def greedy() -> list[int]:
            if not self._protocol.greedy:
                return []
            stock.files.load_state(state)
            written = write(stock, last, self._protocol.greedy, tick)
            values.update(decode_tokens=written.n_decoded, decode_seconds=written.seconds)
            return written.tokens

        self._references.write(item.digest, rows_of(stock, item.following, tick), greedy)
        return values

    def measure(self, session: Session, item: ContinuedText, tick: Tick) -> Values:
        """Compare a session with the logits and the text that reference() stored."""
        last, prompt_seconds = read(session, item.tokens, tick)
        values: Values = {"prompt_tokens": len(item.tokens), "prompt_seconds": prompt_seconds}
        values |= kept_values(session)
        state, budget = session.files.save_state(), session.stats().kv_budget
        values |= self._compare(session, item, tick)
        if self._protocol.greedy:
            session.files.load_state(state)
            session.cache.resize(budget)
            values |= self._write(session, item, last, tick)
        return values

    def _compare(self, session: Session, item: ContinuedText, tick: Tick) -> Values:
        if not self._protocol.inside:
            grow(session, self._protocol.continuation)
        comparison = Comparison()
        for first, rows in self._predictions(session, item, tick):
            reference = self._references.rows(item.digest, first, len(rows))
            comparison.add(reference, rows, item.following[first + 1 : first + 1 + len(rows)])
        agreement = comparison.result()
        return {
            "kl": agreement.kl,
            "top1": agreement.top1,
            "perplexity_ratio": agreement.perplexity_ratio,
        }

    def _predictions(
        self, session: Session, item: ContinuedText, tick: Tick
    ) -> Iterator[tuple[int, Logits]]:
        """Yield rows of logits, each block with the number of its first row.

        Inside the budget they are computed token by token: nothing is evicted within a micro-batch,
        so that a continuation read in one piece would exceed the budget.
        """
        first, step = 0, 1 if self._protocol.inside else len(item.following)
        for start in range(0, len(item.following), step):
            for rows in rows_of(session, item.following[start : start + step], tick):
                yield first, rows
                first += len(rows)

    def _write(self, session: Session, item: ContinuedText, last: Logits, tick: Tick) -> Values:
        if not self._protocol.inside:
            grow(session, self._protocol.greedy)
        written = write(session, last, self._protocol.greedy, tick)
        return {
            "greedy_equal": equal_share(self._references.greedy(item.digest), written.tokens),
            "decode_tokens": written.n_decoded,
            "decode_seconds": written.seconds,
        }


def continued_texts(texts: Sequence[Text], model: Model, protocol: Protocol) -> list[ContinuedText]:
    """Cut every text into a prompt and its continuation; prompt_length() finds lengths that all
    texts have.
    """
    items = []
    for text in texts:
        tokens = tokens_of(model, text)
        end = protocol.prompt + protocol.continuation
        items.append(
            ContinuedText(
                text.name,
                text.digest,
                tuple(tokens[: protocol.prompt]),
                end + protocol.greedy,
                tuple(tokens[protocol.prompt : end]),
            )
        )
    return items


def tokens_of(model: Model, text: Text) -> list[int]:
    """Return all tokens of a text, with BOS where the model wants it."""
    return model.tokenize(text.content, add_bos=model.adds_bos, special=True)

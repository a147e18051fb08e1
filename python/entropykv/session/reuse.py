"""Decide which part of a text that was read before a prompt can continue from.

EntropyLlama uses it for its own sequence, the option --prompt-cache for its file, a pool for the
checkpoints and the server for the conversations that a PrefixIndex finds. Each caller describes a
text as a HeldText, and applies the Reuse that reuse_of() returns. Nothing here changes a sequence.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar, cast

from entropykv.session.sequence import TokenSequence

_BLOCK = 256
"""How many tokens of two texts are compared in one operation."""
Kind = TypeVar("Kind", bound=Hashable)


def common_prefix(first: Sequence[int], second: Sequence[int], begin: int = 0) -> int:
    """Return how many tokens two sequences have in common at their beginning; the first `begin` are
    known to be equal.
    """
    if type(first) is not type(second):  # Sequences of different types are never equal.
        first, second = array("i", first), array("i", second)
    n = min(len(first), len(second))
    for block in range(begin, n, _BLOCK):
        one, other = first[block : block + _BLOCK], second[block : block + _BLOCK]
        if one != other:  # Blocks are compared at once, many tokens in the time of one.
            for index in range(min(len(one), len(other))):
                if one[index] != other[index]:
                    return block + index
    return n


@dataclass(eq=False)
class _Node:
    """Hold a node of the trie: the end of an edge, up to which all texts below the node
    are equal.
    """

    end: int = 0
    """How many tokens all texts below the node share."""
    parent: _Node | None = None
    witness: array[int] = field(default_factory=lambda: array("i"))
    """The tokens of one of the texts below the node."""
    children: dict[int, _Node] = field(default_factory=dict)
    """The nodes below this one, by the first tokens of their edges."""
    items: dict[Hashable, None] = field(default_factory=dict)
    """The texts that end at the node."""

    def below(self, without: _Node | None) -> Iterator[Hashable]:
        """Yield all texts that begin with the node's tokens, except those below another node."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            if node is not without:
                yield from node.items
                nodes += node.children.values()


@dataclass(frozen=True)
class _Text:
    tokens: array[int]
    owner: Hashable
    node: _Node
    last_use: int


class PrefixIndex:
    """Hold texts of several kinds by their tokens and owners, in the order of their last use.

    A pool has one, which holds everything that a prompt may continue from: checkpoints, texts that
    are swapped out, idle conversations of a server, and prompts that are just being read. It has a
    trie over tokens whose edges are runs of tokens (a radix tree) for each owner, so that no lookup
    takes longer because of the texts of other owners. A lookup compares a prompt along one path,
    however many texts begin with it. Edges hold no tokens of their own: each refers to one of the
    texts below it, whose tokens must therefore not change.

    The texts of each kind leave in the order of their last use: code that has to drop, swap out or
    forget texts of a kind begins with the first. Any thread may use the index at any time.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.lock = threading.RLock()
        """The lock that is held while texts are looked at that another thread might remove. It is
        the last in the order of locks: a thread that holds it must not wait for another lock, nor
        for the end of a step.
        """
        self._texts: dict[type, dict[Hashable, _Text]] = {}
        """The texts of each kind; the least recently used is the first."""
        self._roots: dict[Hashable, _Node] = {}
        self._uses = 0

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the texts of a kind, the least recently used first."""
        with self.lock:
            return [
                item
                for of_kind, texts in self._texts.items()
                if issubclass(of_kind, kind)
                for item in cast("dict[Kind, _Text]", texts)
            ]

    def add(self, item: Hashable, tokens: array[int], owner: Hashable = None) -> None:
        """Add a text, as the most recently used."""
        with self.lock:
            self._roots.setdefault(owner, _Node())
            node = self._node_at(owner, tokens)
            node.items[item] = None
            self._uses += 1
            self._texts.setdefault(type(item), {})[item] = _Text(tokens, owner, node, self._uses)

    def touch(self, item: Hashable) -> None:
        """Note that a text is the most recently used."""
        with self.lock:
            texts = self._texts[type(item)]
            self._uses += 1
            texts[item] = replace(texts.pop(item), last_use=self._uses)

    def remove(self, item: Hashable) -> bool:
        """Remove a text; returns False if it was not there, because another thread has removed it.
        After True, no other thread gets the text.
        """
        with self.lock:
            text = self._texts.get(type(item), {}).pop(item, None)
            if text is None:
                return False
            del text.node.items[item]
            self._tidy(text.node, text)
            return True

    def _tidy(self, node: _Node, gone: _Text) -> None:
        """Merge or remove the nodes that are not needed any more without the text `gone`, and let
        no edge refer to its tokens.
        """
        while (above := node.parent) is not None and not node.items and len(node.children) < 2:
            first = gone.tokens[above.end]
            del above.children[first]
            for child in node.children.values():  # A node with a single child is merged with it.
                child.parent, above.children[first] = above, child
            node = above
        if not node.items and not node.children:
            del self._roots[gone.owner]
        while node.parent is not None:
            if node.witness is gone.tokens:
                node.witness = self._witness(node)
            node = node.parent

    def _witness(self, node: _Node) -> array[int]:
        for item in node.items:
            return self._text(item).tokens
        return next(iter(node.children.values())).witness

    def _text(self, item: Hashable) -> _Text:
        return self._texts[type(item)][item]

    def same(self, kind: type[Kind], tokens: array[int], owner: Hashable = None) -> list[Kind]:
        """Return the owner's texts of a kind that consist of just these tokens."""
        with self.lock:
            node, shared = self._path(owner, tokens)[-1]
            found = node.items if shared == node.end == len(tokens) else {}
            return [item for item in found if isinstance(item, kind)]

    def longest_first(
        self, kind: type[Kind], tokens: array[int], owner: Hashable = None
    ) -> list[tuple[Kind, int]]:
        """Return the owner's texts of a kind that begin as `tokens` do, and how many tokens both
        share.

        The texts that share most come first; of several that share as many tokens, texts that end
        there, and then the most recently used.
        """
        with self.lock:
            return [(item, shared) for item, _, shared in self._along(kind, tokens, owner)]

    def _along(
        self, kind: type[Kind], tokens: array[int], owner: Hashable
    ) -> Iterator[tuple[Kind, _Text, int]]:
        seen: _Node | None = None
        for node, shared in reversed(self._path(owner, tokens)[1:]):
            group = [
                (item, self._text(item)) for item in node.below(seen) if isinstance(item, kind)
            ]
            group.sort(key=lambda each: (len(each[1].tokens) > shared, -each[1].last_use))
            for item, text in group:
                yield item, text, shared
            seen = node

    def nearest(
        self,
        kind: type[Kind],
        tokens: array[int],
        owner: Hashable,
        saved: Callable[[Any, int], int],
    ) -> tuple[Kind | None, int]:
        """Return the text of a kind and owner that saves most reading, and how many tokens it
        saves; (None, 0) if none saves any.

        `saved(item, shared)`: returns how many of the `shared` tokens a text saves; it is called
        while `lock` is held. If several texts save as many, one that ends there is taken, or else
        the one that shares most, or else the most recently used.
        """
        best, most, ends = None, 0, False
        with self.lock:
            for item, text, shared in self._along(kind, tokens, owner):
                ends_there = len(text.tokens) == shared
                if shared < most or (shared == most and (ends or not ends_there)):
                    break
                n = saved(item, shared)
                if n > most or (n == most > 0 and ends_there and shared == n):
                    best, most, ends = item, n, ends_there and shared == n
        return best, most

    def _node_at(self, owner: Hashable, tokens: array[int]) -> _Node:
        """Return the node at which a text ends, after making it if necessary."""
        node, shared = self._path(owner, tokens)[-1]
        if shared < node.end:  # The text ends, or differs, within the edge of this node.
            node = self._cut(node, shared)
        if shared == len(tokens):
            return node
        leaf: _Node = _Node(len(tokens), node, tokens)
        node.children[tokens[shared]] = leaf
        return leaf

    @staticmethod
    def _cut(node: _Node, end: int) -> _Node:
        """Return a new node in the middle of an edge."""
        middle = _Node(end, node.parent, node.witness, {node.witness[end]: node})
        if node.parent is not None:  # Roots have no parent, and no edge leads to them.
            node.parent.children[node.witness[node.parent.end]] = middle
        node.parent = middle
        return middle

    def _path(self, owner: Hashable, tokens: array[int]) -> list[tuple[_Node, int]]:
        """Return the nodes along a text, each with how many tokens it and the text share.

        Only for the last node may that be less than the end of the node.
        """
        node, shared = self._roots.get(owner) or _Node(), 0
        path = [(node, 0)]
        while shared == node.end and shared < len(tokens):
            child = node.children.get(tokens[shared])
            if child is None:
                break
            node = child
            shared = min(common_prefix(node.witness, tokens, shared), node.end)
            path.append((node, shared))
        return path


LEAST_SPARED = 32
"""The fewest tokens for which a checkpoint or a copy is worth using: fewer are read just as
quickly.
"""


class ReuseSource(Enum):
    """Name what a prompt continues from."""

    NOTHING = "nothing"
    """Nothing is reused: the prompt is read from its start."""
    WHOLE = "whole"
    """The whole text: the prompt begins with it."""
    PROMPT = "prompt"
    """The end of the last prompt, which is the same as this one, so that the logits there are
    known.
    """
    PART = "part"
    """A part of the text, which must be truncated."""


@dataclass(frozen=True)
class Reuse:
    """Hold a decision: from which position a prompt is read, what it continues from, and why."""

    position: int
    """How many tokens of the prompt are not read again."""
    shared: int
    """How many tokens the prompt and the text have in common."""
    source: ReuseSource
    why: str


@dataclass(eq=False, slots=True)  # A frozen dataclass would cost time for every token.
class HeldText:
    """Describe a text that was read, and to which positions its sequence can be truncated."""

    text: TokenSequence
    """The text of a sequence or of a checkpoint."""
    store_can_return_to: Callable[[int], bool]
    """A function that tells whether windows and recurrent layers can go back to a position."""
    is_whole: bool = True
    """False after a decode that failed half-way: then the text can only be truncated to 0."""
    n_sure: int = 0
    """The longest text, in tokens, of which every KV head is certain to keep all entries."""
    n_ctx: int = 0

    def can_return_to(self, position: int) -> bool:
        """Tell whether truncating to a position leaves exactly the entries that were held when the
        text ended there.
        """
        if position == 0:
            return True
        end = self.text.position
        if not self.is_whole or not self.text.reusable_from <= position <= end:
            return False
        return position == end or self.store_can_return_to(position)

    def keeps_all_until(self, end: int) -> bool:
        """Tell whether it is certain that nothing is evicted while the text grows to
        `end` tokens.
        """
        return min(end, self.n_ctx) <= self.n_sure

    def leads_back_to_prompt(self, position: int, end: int) -> bool:
        """Tell whether the last prompt ended at `position` with known logits, and whether all its
        entries are kept while the text grows to `end` tokens.
        """
        known = self.text.parts.logits_at(position) is not None
        return known and self.keeps_all_until(end) and self.can_return_to(position)


@dataclass(frozen=True)
class Demand:
    """Say what a prompt requires of the text that it continues from."""

    is_cut: bool = True
    """True if a part of the text must end where a reading from 0 would also start a micro-batch, so
    that asking again gives the same numbers.
    """
    end: int | None = None
    """The length in tokens up to which nothing may be evicted, so that numbers are equal; None:
    later evictions do not matter.
    """
    needs_logits: bool = True
    """True if the logits at the end of the prompt are needed, so that its last token is read again
    if they are not known.
    """
    knows_prompt: bool = False
    """True if the logits at the end of the last prompt can be used when that prompt is
    asked again.
    """
    reads_question: bool = False
    """True if a prompt that is asked again is read again as a whole, because something is measured
    while it is read.
    """


def reuse_of(
    held: HeldText, prompt: Sequence[int], demand: Demand, shared: int | None = None
) -> Reuse:
    """Decide from which position a prompt must be read if a text is already held.

    If the prompt begins with the text, all of the text is reused, provided that needed logits are
    there. If it is the last prompt again, all of it is reused where its logits are kept. Otherwise,
    at most a part of the common beginning is reused, without the prompt's last token. `shared`:
    how many tokens the text and the prompt have in common; None: not known yet.
    """
    n_tokens = len(prompt)
    shared = common_prefix(held.text.tokens, prompt) if shared is None else shared
    if demand.reads_question and shared <= held.text.parts.end_of_prompt:
        shared = min(shared, held.text.parts.begin_of_prompt)

    def reuse(position: int, source: ReuseSource, why: str) -> Reuse:
        return Reuse(position, shared, source, why)

    has_end = shared < n_tokens or held.text.logits is not None or not demand.needs_logits
    if 0 < shared == held.text.position and has_end:
        return reuse(shared, ReuseSource.WHOLE, "the prompt begins with all that was read")
    if demand.knows_prompt and shared == n_tokens:
        end = shared if demand.end is None else demand.end
        if held.leads_back_to_prompt(shared, end):
            return reuse(shared, ReuseSource.PROMPT, "the prompt is the last one again")
    if demand.end is not None and not held.keeps_all_until(demand.end):
        return reuse(0, ReuseSource.NOTHING, "entries may be evicted before the end")
    place = min(shared, n_tokens - 1)
    if demand.is_cut:
        place = held.text.parts.begin_before(place)
    if place <= 0:
        return reuse(0, ReuseSource.NOTHING, "the texts begin differently")
    if not held.can_return_to(place):
        return reuse(0, ReuseSource.NOTHING, "what was held there is gone")
    return reuse(place, ReuseSource.PART, "the texts part after this place")

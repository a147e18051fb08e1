"""Decide which replica answers a request: one that has read the beginning of its text, unless too
many requests wait there.

This module does not use Ray. A request has keys, from its own beginning to what many requests
share; the first key that a replica is known to hold decides.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entropykv.files import json_of
from entropykv.server.chat.messages import is_document_part
from entropykv.server.documents.routes import document_name, fields_of, is_form
from entropykv.server.http.errors import RequestError

SHARED_CHARACTERS = 512
"""The fewest characters of a system prompt for which requests go to the same replica; reading a
shorter one again takes less time than waiting.
"""
MOST_KEYS = 1 << 16
"""The most keys whose replicas are remembered; the least recently used are forgotten first."""
MOST_HOLDERS = 8
"""The most replicas that are remembered for a key."""
_DOCUMENTS = re.compile(r".*/v1/documents(?:/([^/]+))?/?", re.DOTALL)
"""The paths of the routes of documents."""
_PROMPT_CHARACTERS = 2048
"""By how many characters of its text, or of its first turn, a prompt is told from others."""


@dataclass(frozen=True)
class Affinity:
    """Say what of a request a replica may have read before."""

    conversation: str | None = None
    """A digest of the user, and of the name of the conversation or document; the same replica
    answers all of its requests. None: it has no name.
    """
    keys: tuple[str, ...] = ()
    """What the text begins with, the longest beginning first, as digests."""


def affinity_of(
    conversation: str | None, user: str, body: bytes, path: str = "", kind: str = ""
) -> Affinity:
    """Return the affinity of a request.

    `user` is the header Authorization, with the API key, or empty: texts of different users are not
    compared. A body that is no request has no keys, and is refused by the replica that gets it.
    `path` is that of the URL, and `kind` the content type: one replica reads a document, says how
    far it is, and deletes it.
    """
    if (routes := _DOCUMENTS.fullmatch(path)) is not None:
        return _of_document(user, routes[1] or _sent_name(body, kind))
    request = json_of(body)
    keys = _keys_of(user, request) if isinstance(request, dict) else ()
    name = None if conversation is None else _digest("name", user, conversation)
    return Affinity(name, keys)


def _keys_of(user: str, request: Mapping[str, Any]) -> tuple[str, ...]:
    model, document = request.get("model"), request.get("document")
    before = [request.get("system"), request.get("instructions")]
    messages = request.get("messages")
    if not isinstance(messages, list):
        messages = request.get("input")
    first: Any = request.get("prompt")
    if isinstance(messages, list):
        turns = [turn for turn in messages if isinstance(turn, dict)]
        before += [turn.get("content") for turn in turns if _is_system(turn)]
        first = next((turn.get("content") for turn in turns if not _is_system(turn)), None)
    elif isinstance(messages, str):
        first = messages
    document = document or _document_in(messages)
    system = json.dumps([text for text in before if text], sort_keys=True)
    shared = ("shared", user, model, document, system)
    keys = []
    if isinstance(first, str):
        first = first[:_PROMPT_CHARACTERS]
    if first:
        keys.append(_digest("text", *shared, first))
    if document or len(system) >= SHARED_CHARACTERS:
        keys.append(_digest(*shared))
    if isinstance(document, str):
        keys.append(_document_key(user, document))
    return tuple(keys)


def _of_document(user: str, name: str | None) -> Affinity:
    """Return the affinity of requests about a document; an empty one without its name."""
    if not name:
        return Affinity()
    key = _document_key(user, name)
    return Affinity(key, (key,))


def _sent_name(body: bytes, kind: str) -> str | None:
    """Return the name of the document that a body sends, as JSON or as a form."""
    if is_form(kind):
        try:
            return document_name(fields_of(body, kind))
        except RequestError:
            return None
    request = json_of(body)
    name = request.get("name") if isinstance(request, dict) else None
    return name if isinstance(name, str) else None


def _document_key(user: str, document: str) -> str:
    """Return the key of a document; the replica that reads the document holds it."""
    return _digest("document", user, document)


def _is_system(turn: Mapping[str, Any]) -> bool:
    return turn.get("role") in ("system", "developer")


def _document_in(messages: Any) -> Any:
    """Return the name in the first content part that names a document, in the forms that routes
    accept.
    """
    for turn in messages if isinstance(messages, list) else ():
        parts = turn.get("content") if isinstance(turn, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and is_document_part(part):
                file = part.get("file", part)
                return file.get("file_id") if isinstance(file, dict) else None
    return None


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


class Holders:
    """Remember which replicas hold what, and choose one for every request.

    `slack`: how many requests more than the least loaded replica a holder may have.
    """

    def __init__(self, slack: int) -> None:
        """Start without knowing what any replica holds."""
        self._slack = slack
        self._of: OrderedDict[str, list[str]] = OrderedDict()
        """The replicas of every key, the latest first."""

    def choose(self, affinity: Affinity, loads: Mapping[str, int]) -> str:
        """Return the replica that answers a request, and remember that it holds the keys.

        `loads`: how many requests every living replica has, one replica at least. A named
        conversation stays with its replica under any load, while the same replicas live, since two
        replicas do not know of each other's turns. The choice for its name is the same in every
        process.
        """
        if affinity.conversation is not None:
            chosen = min(loads, key=lambda replica: _digest(affinity.conversation, replica))
        else:
            chosen = self._holder(affinity.keys, loads) or _least(affinity.keys, loads)
        self._note(affinity.keys, chosen)
        return chosen

    def _holder(self, keys: Sequence[str], loads: Mapping[str, int]) -> str | None:
        most = min(loads.values()) + self._slack
        for key in keys:
            alive = [replica for replica in self._of.get(key, ()) if replica in loads]
            if alive and loads[best := min(alive, key=loads.__getitem__)] <= most:
                return best
        return None

    def _note(self, keys: Sequence[str], replica: str) -> None:
        for key in keys:
            others = [other for other in self._of.pop(key, ()) if other != replica]
            self._of[key] = [replica, *others][:MOST_HOLDERS]
        while len(self._of) > MOST_KEYS:
            self._of.popitem(last=False)


def _least(keys: Sequence[str], loads: Mapping[str, int]) -> str:
    """Return the least loaded replica; of equal ones, the same in every process by the last key."""
    return min(loads, key=lambda replica: (loads[replica], _digest(*keys[-1:], replica)))

"""Read the files of the page at /, and restrict what a browser lets them do."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from starlette.responses import Response

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""The content security policy: the page may run its own scripts, and access only its own server."""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Return content and media type of every file of the page, by the path of its route."""
    files = {}
    for file in (resources.files("entropykv.server.page") / "static").iterdir():
        path = "/" if file.name == "index.html" else f"/web/{file.name}"
        kind = _KINDS.get(file.name.rpartition(".")[2], "text/plain")
        files[path] = file.read_bytes(), kind
    return files


def page_file(path: str, known: str | None) -> Response:
    """Return a file of the page, or 304 without content if the browser's copy (`known`) is
    current.
    """
    content, kind = page_files()[path]
    tag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
    headers = {**_HEADERS, "etag": tag}
    if known == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)

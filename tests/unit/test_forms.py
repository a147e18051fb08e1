"""An uploaded form is split byte by byte, within limits of parts and seconds."""

from __future__ import annotations

from contextlib import suppress

import httpx
import pytest

from entropykv.server.documents.routes import document_name, fields_of, is_form, text_of
from entropykv.server.http.errors import RequestError
from entropykv.server.replicas.affinity import affinity_of
from tests.support.cpu_time import takes_less_than

KIND = "multipart/form-data; boundary=B"


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    lines = ((b"--B", *head.encode().splitlines(), b"", data) for head, data in parts)
    return b"".join(b"\r\n".join([*part, b""]) for part in lines) + b"--B" + end


def named(name: str, data: bytes, more: str = "") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"{more}', data


@pytest.mark.parametrize(
    "data",
    [b"", b"A cat.", b"\r\n", b"\n\r\n\r\n", b"--Bx", b"\r\n--Bx\r\n", b"x\r\n--", "ü\0".encode()],
)
def test_data_stays_as_it_is(data: bytes) -> None:
    fields = fields_of(form(named("file", data, '; filename="a.txt"'), named("name", b"b")), KIND)
    assert fields["file"].data == data
    assert fields["file"].filename == "a.txt"
    assert document_name(fields) == text_of(fields["name"], "name") == "b"


@pytest.mark.parametrize(
    ("filename", "name"),
    [("The book.txt", "The book"), ("ü.txt", "ü"), ("C:\\\\x\\\\a.b.txt", "a.b"), ("../x", "x")],
)
def test_a_document_without_a_name_has_that_of_its_file(filename: str, name: str) -> None:
    body = form(named("file", b"x", f'; filename="{filename}"'))
    assert document_name(fields_of(body, KIND)) == name


def test_forms_of_a_client_are_understood() -> None:
    request = httpx.Request(
        "POST", "http://x", files={"file": ("a ü.txt", b"\r\nx\n")}, data={"name": "book"}
    )
    kind = request.headers["content-type"]
    assert is_form(kind)
    fields = fields_of(request.read(), kind)
    assert fields["file"].data == b"\r\nx\n"
    assert document_name(fields) == "book"
    posted = affinity_of(None, "me", request.read(), "/v1/documents", kind)
    assert posted == affinity_of(None, "me", b"", "/v1/documents/book")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", KIND),
        (b"x", KIND),
        (form(named("file", b"x"), end=b""), KIND),
        (form(named("file", b"x"))[:-5], KIND),
        (form(named("file", b"x")), "multipart/form-data"),
        (form(named("file", b"x")), f"multipart/form-data; boundary={'B' * 71}"),
        (form(named("file", b"x")), "multipart/form-data; boundary=ü"),
        (form(*[named(str(n), b"x") for n in range(17)]), KIND),
        (form(("X: " + "x" * 9000, b"x")), KIND),
        (b"--B\r\nno headers\r\n--B--\r\n", KIND),
        (form(named("file", b"eA==", "\r\nContent-Transfer-Encoding: base64")), KIND),
    ],
)
def test_what_is_no_form_is_refused_with_a_sentence(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError) as refused:
        fields_of(body, kind)
    assert refused.value.status_code == 400
    assert affinity_of(None, "me", body, "/v1/documents", kind).keys == ()


@pytest.mark.parametrize("data", [b"\n", b"\r\n", b"\r\n--B", b"\r\n--B ", b"--B\r\n", b"\r\n\r\n"])
def test_a_large_form_takes_no_second_of_the_processor(data: bytes) -> None:
    body = form(named("file", data * ((16 << 20) // len(data))))

    def read() -> None:
        with suppress(RequestError):  # The form has too many parts.
            fields_of(body, KIND)

    assert takes_less_than(1, read)

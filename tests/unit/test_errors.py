"""Messages of errors are one line, without characters that a terminal or a log would interpret."""

from __future__ import annotations

import pickle

import pytest

from entropykv import errors


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("a tensor \noutput", "a tensor \\noutput"),
        ("a name \x1b[2J", "a name \\x1b[2J"),
        ("a path \udcff", "a path \\udcff"),
        ("a line\u2028 separator", "a line\\u2028 separator"),
        ("schön, 模型 and C:\\new", "schön, 模型 and C:\\new"),
    ],
)
def test_what_does_not_print_is_escaped(message: str, shown: str) -> None:
    error = errors.ModelFileError(message)
    assert str(error) == shown
    assert str(pickle.loads(pickle.dumps(error))) == shown  # noqa: S301
    str(error).encode()


def test_every_error_of_the_package_takes_one_message() -> None:
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert len(kinds) > 10
    for kind in kinds:
        assert str(kind("one\ntwo")) == "one\\ntwo"

"""`make check-clang-cl` parses the files that CMake would compile, with its definitions and
warnings.
"""

from __future__ import annotations

import parse_with_clang_cl


def test_flags_of_gcc_become_flags_of_clang_cl() -> None:
    command = (
        "/usr/bin/c++ -DENTROPYKV_X86 -I/src/cpp -isystem '/x y/include' -O3 -DNDEBUG -std=c++17 "
        "-Wa,-muse-unaligned-vector-move -Wconversion -Wno-maybe-uninitialized -mavx2 -o a.obj "
        "-c /src/cpp/a.cpp"
    )
    assert list(parse_with_clang_cl.own_arguments(command)) == [
        "/DENTROPYKV_X86",
        "/I/src/cpp",
        *("-imsvc", "/x y/include"),
        "/DNDEBUG",
        "/clang:-Wconversion",
        "/clang:-mavx2",
    ]

"""Parse all C++ sources for Windows as clang-cl does, which uses Microsoft's dialect and ABI.

    python backend/parse_with_clang_cl.py ZIG build/clang_cl/compile_commands.json

ZIG is the program of the package `ziglang`, which has clang-cl, the C++ library of LLVM, and the C
headers of mingw-w64. They stand in for Visual Studio's, so nothing is compiled or linked. The other
file is CMake's list of what it would compile for Windows. A warning is an error. The exit code is 0
only if all sources were parsed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADERS = Path(__file__).with_name("clang_cl_headers.hpp")
# CMakeLists.txt gives these flags to every clang; the list that is read here has those for GCC.
CLANG_FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wgnu", "-Werror"]
ONLY_GCC_KNOWS = {"-Wa,-muse-unaligned-vector-move", "-Wno-maybe-uninitialized"}


def fixed_arguments(zig: Path) -> list[str]:
    """Return the arguments of clang-cl that are the same for every source."""
    headers = zig.parent / "lib"
    folders = ["libcxx/include", "include", "libc/include/any-windows-any"]
    return [
        *(str(zig), "clang", "--driver-mode=cl", "--target=x86_64-pc-windows-msvc"),
        *("/nologo", "/std:c++17", "/EHsc", "/utf-8", "/clang:-fsyntax-only"),
        "-Wno-unused-command-line-argument",
        # The headers of mingw-w64 expect GCC, or a compiler that claims to be GCC.
        *("/clang:-fgnuc-version=12.1", f"/FI{HEADERS}"),
        *(f"/clang:{flag}" for flag in CLANG_FLAGS),
        *(part for folder in folders for part in ("-imsvc", str(headers / folder))),
    ]


def own_arguments(command: str) -> Iterator[str]:
    """Yield the parts of a command of GCC that clang-cl needs: definitions, headers, instruction
    sets, warnings.
    """
    words = iter(shlex.split(command))
    for word in words:
        if word == "-isystem":
            yield from ("-imsvc", next(words))
        elif word.startswith(("-D", "-I")):
            yield f"/{word[1:]}"
        elif word.startswith(("-m", "-W")) and word not in ONLY_GCC_KNOWS:
            yield f"/clang:{word}"


def main(zig: Path, commands: Path) -> int:
    """Parse every source of the list; returns the exit code."""
    entries = json.loads(commands.read_text(encoding="utf-8"))
    fixed = fixed_arguments(zig.absolute())
    failed = []
    for entry in entries:
        # clang-cl would read a path that begins with a slash as an option.
        source = Path(entry["file"]).relative_to(ROOT)
        command = [*fixed, *own_arguments(entry["command"]), str(source)]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:  # noqa: S603
            failed.append(source)
    print(f"clang-cl parsed {len(entries) - len(failed)} of {len(entries)} sources")
    return 1 if failed or not entries else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

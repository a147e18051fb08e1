"""Try a wheel of entropykv as on a machine that has no compiler and none of this machine's files.

It must name no path of the machine that built it, install into a new environment beside the
llama-cpp-python that it was built against, and answer a question there.

    python backend/try_wheel.py dist/entropykv-*.whl FOLDER_WITH_LLAMA_CPP_PYTHON
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from installed_llama_cpp import installed

ROOT = Path(__file__).resolve().parents[1]


def machine_paths() -> list[str]:
    """Return the folders of this machine that no file of a wheel may name.

    A folder inside another one of them, such as a checkout in /tmp, is left out, because a search
    finds it by the outer one.
    """
    own = {ROOT, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir())} - {Path("/")}
    return sorted(f"{path}/" for path in own if own.isdisjoint(path.parents))


def named_paths(wheel: Path) -> list[str]:
    """Return `file: path` for every path of these folders that a file of the wheel names."""
    found: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            for path in machine_paths():
                named = re.findall(re.escape(path.encode()) + rb"[\x21-\x7e]*", data)
                found.extend(f"{name}: {each.decode()}" for each in named)
    return found


def answer(wheel: Path, release: str, wheels: str) -> str:
    """Install the wheel without a compiler, and return the answer of the demo model."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / "bin"
        # PATH has only the programs of the environment: no compiler, no cmake, no git.
        environment = {**os.environ, "PATH": str(programs), "CC": "/none", "CXX": "/none"}
        install = ["pip", "install", "-q", "--only-binary", ":all:", "--find-links", wheels]
        for command in (
            [*install, f"llama-cpp-python=={release}", str(wheel)],
            ["entropykv", "run", "--demo", "bitnet", "--temp", "0", "--kv-budget", "0.5"],
        ):
            result = subprocess.run(  # noqa: S603
                [str(programs / command[0]), *command[1:]],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            if result.returncode:
                sys.exit(f"{' '.join(command)} failed beside {wheel.name}")
        return result.stdout.strip()


def main() -> None:
    """Try the wheel; exit with a sentence if something is wrong."""
    wheel, wheels = Path(sys.argv[1]).resolve(), str(Path(sys.argv[2]).resolve())
    if paths := named_paths(wheel):
        sys.exit(f"{wheel.name} names paths of this machine: {', '.join(paths)}")
    found = installed()
    if found is None:
        sys.exit("there is no llama-cpp-python that the wheel was built against")
    text = answer(wheel, found.version, wheels)
    if not text:
        sys.exit(f"{wheel.name}: the demo model answers nothing")
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, for llama-cpp-python")
    print(f"{found.version}; without a compiler the demo model answers: {text}")


if __name__ == "__main__":
    main()

"""The code for Windows works, with functions of Windows replaced by fakes on this system."""

from __future__ import annotations

import ast
import errno
import fcntl
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entropykv import system
from entropykv.cli.terminal import EXIT_TERMINATED, orderly_termination
from entropykv.errors import DocumentBusyError, FreezeError, ModelFileError, ProfileError
from entropykv.files import new_file
from entropykv.hub.listing import listing_of
from entropykv.model.header import check_prefix
from entropykv.profile.profile import EntropyProfile
from entropykv.server.engine.turns import Conversations
from entropykv.server.http.access import Caller
from entropykv.session import document
from entropykv.store.cold import ColdFile
from tests.support.systems import OF_POSIX, absent_imports, is_there, left_out


class FakeRuntime(SimpleNamespace):
    """Stand in for the module msvcrt: lock files and note the places, or raise its errors."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []

    def locking(self, descriptor: int, mode: int, size: int) -> None:
        assert (mode, size) == (self.LK_NBLCK, 1)
        self.places.append(os.lseek(descriptor, 0, os.SEEK_CUR))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    def get_osfhandle(self, descriptor: int) -> int:
        return descriptor + 1000


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(system, "WINDOWS", True)
    monkeypatch.setitem(sys.modules, "msvcrt", runtime)
    for name in ("pread", "pwrite", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
        monkeypatch.delattr(os, name)
    return runtime


REFUSED = ["NUL", "con.gguf", "a/COM1", "lpt9.tar.gz", "aux .txt", "a:b", "what?", "dot.", "end "]
ACCEPTED = ["model.gguf", "../a", ".hidden", "console.gguf", "com10", "nulls/aux_1", "模型.gguf"]


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("path", [*REFUSED, "a\\nul"])
def test_windows_has_no_file_of_such_a_name(path: str) -> None:
    assert system.name_obstacle(path) is not None


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("path", ACCEPTED)
def test_windows_has_files_of_other_names(path: str) -> None:
    assert system.name_obstacle(path) is None


def test_other_systems_have_files_of_all_names() -> None:
    assert system.name_obstacle("a:b/NUL. ") is None


@pytest.mark.usefixtures("windows")
def test_a_new_file_is_refused_by_its_name_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="device of Windows"), new_file(tmp_path / "nul.ekv"):
        pytest.fail("a file was made")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("windows")
def test_files_of_the_hub_that_windows_cannot_have_are_left_out() -> None:
    names = ("model.gguf", "aux.gguf", "folder./model.gguf")
    answer = {"sha": "a" * 40, "siblings": [{"rfilename": name, "size": 1} for name in names]}
    assert [file.path for file in listing_of("a/b", answer).files] == ["model.gguf"]


def test_a_file_is_synced_through_a_descriptor_that_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []

    def fsync(descriptor: int) -> None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        synced.append(mode != os.O_RDONLY)

    monkeypatch.setattr(os, "fsync", fsync)
    with new_file(tmp_path / "a") as part:
        part.write_bytes(b"content")
    assert synced[0]
    assert (tmp_path / "a").read_bytes() == b"content"


@pytest.mark.usefixtures("windows")
def test_a_folder_is_not_synced_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a folder was opened"))
    system.sync_folder(tmp_path)


def test_frozen_entries_have_their_file_on_windows(windows: FakeRuntime, tmp_path: Path) -> None:
    file = ColdFile.create(tmp_path, 4096, {"name": "model"})
    file.check()
    assert windows.places == [0x7FFF_FFFE]
    assert system.number_of(file.descriptor) == file.descriptor + 1000
    other = ColdFile.create(tmp_path, 4096, {"name": "model"})
    assert other.n_leftovers == 0  # The lock of the first file is held.
    for each in (file, other):
        each.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("windows")
def test_a_damaged_file_of_frozen_entries_is_refused_without_pread(tmp_path: Path) -> None:
    file = ColdFile.create(tmp_path, 4096, {"name": "model"})
    with open(file.path, "r+b") as changed:
        changed.write(b"other")
    with pytest.raises(FreezeError, match="not a file of frozen entries any more"):
        file.check()
    file.close()


def test_the_number_of_a_file_is_its_descriptor_elsewhere(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        assert system.number_of(file.fileno()) == file.fileno()


@pytest.mark.usefixtures("windows")
def test_functions_of_glibc_are_asked_for_only_where_they_can_be() -> None:
    assert system.c_function("malloc_trim") is None


def test_a_missing_function_of_the_c_library_is_none() -> None:
    assert system.c_function("no_function_has_this_name") is None


@pytest.mark.usefixtures("windows")
def test_windows_is_asked_for_the_peak_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_peak_on_windows", lambda: 7)
    assert system.peak_rss_bytes() == 7


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_piped_output_is_utf8(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    system.prepare_streams()
    sys.stdout.write("模型 \udce9")
    sys.stdout.flush()
    assert raw.getvalue().decode("utf-8") == "模型 ?"


def test_a_pipe_or_device_given_as_a_profile_or_model_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "entropy_config.json"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ProfileError, match="not a regular file; give the path of a profile"):
            EntropyProfile.load(path)
        with pytest.raises(ModelFileError, match="not a regular file; give the path of a GGUF"):
            check_prefix(path)
    with pytest.raises(ProfileError, match="is a directory"):
        EntropyProfile.load(tmp_path)


@pytest.fixture
def unlinks_closed_files(
    monkeypatch: pytest.MonkeyPatch,
    windows: FakeRuntime,  # noqa: ARG001
) -> None:
    """Refuse, as Windows does, to remove a file that is open."""
    unlink = os.unlink

    def only_if_closed(path: str | os.PathLike[str], **_: Any) -> None:
        for each in Path("/proc/self/fd").iterdir():
            if each.exists() and each.samefile(path):
                raise PermissionError(errno.EACCES, "it is being used by another process")
        unlink(path)

    monkeypatch.setattr(os, "unlink", only_if_closed)
    monkeypatch.setattr(Path, "unlink", lambda path, **_: only_if_closed(path))


@pytest.mark.usefixtures("unlinks_closed_files")
def test_the_lock_of_a_document_is_removed_where_open_files_cannot_be(tmp_path: Path) -> None:
    with document._locked(tmp_path / "book.kv"):
        assert (tmp_path / "book.kv.lock").exists()
        with pytest.raises(DocumentBusyError, match="another process is reading this document"):
            document._locked(tmp_path / "book.kv").__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unlinks_closed_files")
def test_files_of_dead_processes_are_removed_where_open_files_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "entropykv-1-0.cold").write_bytes(b"EKVCOLD\0")
    (tmp_path / "entropykv-1-1.cold").write_bytes(b"of somebody else")
    file = ColdFile.create(tmp_path, 4096, {"name": "model"})
    assert file.n_leftovers == 1
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["entropykv-1-1.cold"]


@pytest.mark.usefixtures("unlinks_closed_files")
def test_a_conversation_that_another_replica_reads_stays(tmp_path: Path) -> None:
    conversations = Conversations(tmp_path, 1, SimpleNamespace())  # type: ignore[arg-type]
    files = [tmp_path / f"{name}.session" for name in "ab"]
    for file in files:
        file.write_bytes(b"12")
    with open(files[0], "rb"):
        conversations._remove_oldest()
    assert [file.exists() for file in files] == [True, False]


def test_a_conversation_whose_name_is_refused_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Caller] = []
    cache = SimpleNamespace(load=lambda caller, _: loaded.append(caller))
    conversations = Conversations(tmp_path, 1, cache)  # type: ignore[arg-type]
    caller = Caller(name="a")
    conversations.path(caller).write_bytes(b"12")

    def refused(path: Path, **_: Any) -> os.stat_result:
        raise PermissionError(errno.EACCES, "it is being removed", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refused)
        conversations.enter(caller)
    assert loaded == []
    conversations.enter(caller)
    assert loaded == [caller]


@pytest.mark.parametrize(("on_windows", "option"), [(True, -5), (False, socket.SO_REUSEADDR)])
def test_a_second_server_does_not_share_an_address(
    monkeypatch: pytest.MonkeyPatch, on_windows: bool, option: int
) -> None:
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(system, "WINDOWS", on_windows)
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    system.keep_address(SimpleNamespace(setsockopt=lambda *each: given.append(each)))
    assert given == [(socket.SOL_SOCKET, option, 1)]


def test_ctrl_break_ends_a_command_as_sigterm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with pytest.raises(SystemExit) as ended, orderly_termination():
            signal.raise_signal(number)
        assert ended.value.code == EXIT_TERMINATED
        assert signal.getsignal(number) is signal.SIG_DFL


class FakeConsole(SimpleNamespace):
    """Stand in for kernel32: hold the mode of a console, which may be old or missing."""

    def __init__(self, mode: int, *, is_console: bool = True, is_old: bool = False) -> None:
        super().__init__(mode=mode, is_console=is_console, is_old=is_old)

    def GetConsoleMode(self, _: object, mode: Any) -> int:  # noqa: N802
        mode._obj.value = self.mode
        return int(self.is_console)

    def SetConsoleMode(self, _: object, mode: int) -> int:  # noqa: N802
        if self.is_old:
            return 0
        self.mode = mode
        return 1


@pytest.mark.usefixtures("windows")
def test_consoles_of_windows_are_told_to_show_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(isatty=lambda: True, fileno=lambda: 2)
    console = FakeConsole(3)
    monkeypatch.setattr(system, "_kernel32", lambda: console)
    assert system.shows_escapes(stream)
    assert console.mode == 7
    for other in (FakeConsole(3, is_old=True), FakeConsole(3, is_console=False)):
        monkeypatch.setattr(system, "_kernel32", lambda other=other: other)
        assert not system.shows_escapes(stream)
    assert not system.shows_escapes(SimpleNamespace(isatty=lambda: False))


MODULES_OF_SOME_SYSTEMS = {*OF_POSIX, "msvcrt", "winreg"}
NAMES_OF_SOME_SYSTEMS = {
    "os": {
        *("fork", "getuid", "geteuid", "kill", "killpg", "mkfifo", "pread", "pwrite", "rename"),
        *("setsid", "startfile", "statvfs", "uname", "O_BINARY", "O_CLOEXEC", "O_NOFOLLOW"),
    },
    "select": {"epoll", "kqueue", "poll", "select"},
    "signal": {
        *("alarm", "pause", "setitimer", "SIGALRM", "SIGBREAK", "SIGHUP", "SIGKILL", "SIGPIPE"),
        *("SIGUSR1", "SIGUSR2"),
    },
    "socket": {"AF_UNIX", "SO_EXCLUSIVEADDRUSE", "SO_REUSEADDR", "SO_REUSEPORT"},
    "sys": {"platform", "getwindowsversion"},
}


def names_of_some_systems(tree: ast.AST) -> Iterator[str]:
    """Yield imports and attributes that another system lacks, or that mean something else there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in MODULES_OF_SOME_SYSTEMS)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES_OF_SOME_SYSTEMS:
            yield node.module
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            module, _, attribute = name.rpartition(".")
            if attribute in NAMES_OF_SOME_SYSTEMS.get(module, ()):
                yield name


def test_the_code_of_one_system_is_found() -> None:
    code = "import os, signal, fcntl\nos.kill(1, signal.SIGHUP)\nsignal.SIGINT"
    assert [*names_of_some_systems(ast.parse(code))] == ["fcntl", "os.kill", "signal.SIGHUP"]


def test_only_one_module_does_what_some_systems_cannot_do() -> None:
    package = Path(system.__file__).parent
    found = {
        file.relative_to(package).as_posix(): names
        for file in package.rglob("*.py")
        if (names := {*names_of_some_systems(ast.parse(file.read_text(encoding="utf-8")))})
    }
    assert {*found} == {"system.py"}


def test_test_modules_that_a_system_cannot_import_are_left_out_by_name() -> None:
    here = Path(__file__)
    assert absent_imports(here, {"fcntl", "pty"}) == ["fcntl"]
    assert absent_imports(here, {"pty"}) == absent_imports(here.with_name("a.txt"), {"pty"}) == []
    lines = [*left_out(here.parent, {"fcntl"})]
    assert f"not run: {here.name}, because this system has no fcntl" in lines
    assert [*left_out(here.parent)] == []


@pytest.mark.parametrize(
    ("need", "there"),
    [
        ("/proc/self/fd", True),
        ("/proc/none", False),
        ("os.mkfifo", True),
        ("os.startfile", False),
        ("msvcrt", False),
        ("msvcrt.locking", False),
        ("signal.SIGKILL", True),
        ("malloc()", True),
        ("no_function_has_this_name()", False),
        ("permissions", os.geteuid() != 0),
    ],
)
def test_what_a_test_needs_is_looked_for(need: str, there: bool) -> None:
    assert is_there(need) is there


NEEDS_A_MARKER = re.compile(
    r"os\.(fork|mkfifo|geteuid|killpg|setsid)\b|SIGKILL|\.send_signal\(|/proc/self|/dev/full|setrlimit"
)


def unmarked_tests(file: Path) -> Iterator[str]:
    """Yield the tests of a file that only some systems can run, and that have no marker `needs`.

    Only the bodies of tests are looked at, so a test that calls such a function indirectly is
    missed.
    """
    text = file.read_text(encoding="utf-8")
    if not NEEDS_A_MARKER.search(text) or "systems" in file.name or absent_imports(file, OF_POSIX):
        return
    for test in ast.parse(text).body:
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith(
            "test_"
        ):
            marks = [ast.unparse(each) for each in test.decorator_list]
            if NEEDS_A_MARKER.search(ast.unparse(test)) and not any(".needs(" in m for m in marks):
                yield f"{file.name}: {test.name}"


def test_tests_that_only_some_systems_can_run_have_a_marker(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text("def test_a(path):\n    os.mkfifo(path)\n", encoding="utf-8")
    assert [*unmarked_tests(file)] == ["test_x.py: test_a"]
    tests = Path(__file__).parents[1]
    assert [name for file in tests.rglob("test_*.py") for name in unmarked_tests(file)] == []

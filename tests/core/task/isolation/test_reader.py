"""A forked reader: whatever the code in it does, the driver gets an error in words, and goes on."""

import ctypes
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anytron.base.errors import AnytronError, ConfigError, DataError
from anytron.task.isolation import reader as module
from anytron.task.isolation.plain import packed, unpacked
from anytron.task.isolation.reader import ConfinedReader, Errand

ERRAND = Errand(DataError, "It cannot be read.", "some file", "write it again")
MIB = 1 << 20


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


def panic():
    raise Panic("it panics\x1b[2J")


def raised(error):
    raise error


def raised_from(error, cause):
    raise error from cause


def deep(levels=10**6):
    return deep(levels - 1)


def write_frame(frame):
    os.write(3, len(frame).to_bytes(4, "big") + frame)


DEEDS = {
    "panics": (panic, "Panic: it panics"),
    "raises": (lambda: raised(ValueError("no number")), "ValueError: no number"),
    "says an error of ours": (lambda: raised(ConfigError("No.", where="there", why="so", fix="this")), "No.*there.*so"),
    "recurses": (deep, "RecursionError"),
    "wants to exit": (lambda: sys.exit(3), "SystemExit: 3"),
    "exits": (lambda: os._exit(3), "exited with status 3"),
    "aborts": (lambda: (os.write(2, b"last words\n"), os.abort()), r"killed by SIG\w+ \(last words\)"),
    "reads no memory of its own": (lambda: ctypes.string_at(0), "killed by SIGSEGV"),
    "takes memory": (lambda: bytearray(300 * MIB), "more memory than"),
    "takes memory in C": (lambda: b"a".ljust(10**10), "more memory than"),
    "computes without end": (lambda: [None for _ in iter(int, 1)], "computed for 0.3 s without progress"),
    "computes in one call": (lambda: sum(range(10**11)), "computed for 0.3 s"),
    "writes without end": (lambda: [os.write(2, b"a" * 4096) for _ in range(300)], "Operation not permitted"),
    "has no files left": (lambda: raised(OSError(errno.EMFILE, "no more")), r"no file descriptors left.*ulimit -n"),
    "has no files left, as it says": (
        lambda: raised_from(ConfigError("The tokenizer cannot be loaded."), ValueError("too many (os error 24)")),
        "no file descriptors left",
    ),
    "connects": (socket.socket, "PermissionError"),
    "starts a program": (lambda: os.execv("/bin/true", ["true"]), "PermissionError"),
    "forks": (os.fork, "PermissionError"),
    "signals the driver": (lambda: os.kill(DRIVER, signal.SIGKILL), "PermissionError"),
    "writes a file": (lambda: WRITTEN.write_text(""), "PermissionError"),
    "gives what is no data": (object, "is not plain data"),
    "writes nonsense": (lambda: (write_frame(b"nonsense"), time.sleep(9)), "wrote an invalid answer"),
    "writes an unknown kind": (
        lambda: (write_frame(packed(["error", ["Exit", "", "", "", ""]])), time.sleep(9)),
        "invalid answer",
    ),
    "writes another message": (
        lambda: (write_frame(packed(["nonsense", 1])), time.sleep(9)),
        "wrote an invalid answer",
    ),
    "is ended by a signal without a name": (lambda: os.kill(os.getpid(), 40), "killed by signal 40"),
    "writes an endless answer": (lambda: (os.write(3, b"\x7f\xff\xff\xff"), time.sleep(9)), "an incomplete answer"),
}
DRIVER = os.getpid()
WRITTEN = Path(tempfile.gettempdir(), "anytron-reader-was-here")


def serve(name, note):
    yield "begun"
    note()
    if name in DEEDS:
        yield DEEDS[name][0]()
    yield name


@pytest.fixture
def reader():
    made = ConfinedReader(serve, memory=256 * MIB, compute_s=0.3)
    yield made
    made.close()


@pytest.mark.some(9)
@pytest.mark.parametrize("name", DEEDS)
def test_whatever_happens_is_an_error_in_words_and_the_next_call_is_answered(reader, name, monkeypatch):
    if name == "writes an endless answer":
        monkeypatch.setattr(module, "MESSAGE_S", 1.0)
    with pytest.raises(AnytronError, match=f"(?s){DEEDS[name][1]}") as caught:
        list(reader.ask(name, ERRAND))
    assert (
        len([part for part in (caught.value.what, caught.value.where, caught.value.why, caught.value.fix) if part]) == 4
    )
    assert list(reader.ask("sound", ERRAND)) == ["begun", "sound"]


def test_each_limit_is_what_stops_it(monkeypatch):
    """Without it, the same deed is done: the twin of the test above."""
    reader = ConfinedReader(serve)
    monkeypatch.setattr(module, "_limit", lambda memory: None)
    monkeypatch.setattr(module, "confine", lambda: None)
    monkeypatch.setitem(DEEDS, "memory", (lambda: len(bytearray(300 * MIB)), ""))
    monkeypatch.setitem(DEEDS, "network", (lambda: socket.socket().fileno() > 0, ""))
    for name, value in (("memory", 300 * MIB), ("network", True)):
        assert list(reader.ask(name, ERRAND)) == ["begun", value, name]


def test_a_machine_that_cannot_confine_reads_nothing(reader, monkeypatch):
    monkeypatch.setattr(module, "confine", lambda: raised(OSError("no filter here")))
    with pytest.raises(DataError, match=r"cannot confine.*no filter here"):
        list(reader.ask("sound", ERRAND))


def test_time_begins_anew_where_it_comes_further():
    def slow(call, note):
        for _ in range(call):
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
            note()
        yield "done"

    assert list(ConfinedReader(slow, compute_s=0.4).ask(5, ERRAND)) == ["done"]


def test_who_stops_early_leaves_no_process_and_gets_the_right_answer_next(reader):
    answers = reader.ask("first", ERRAND)
    assert next(answers) == "begun"
    pid = reader._child.pid
    answers.close()
    assert not Path(f"/proc/{pid}").exists()
    assert list(reader.ask("second", ERRAND)) == ["begun", "second"]


def test_it_has_no_open_file_of_the_drivers(tmp_path):
    def files(call, note):
        places = sorted(Path("/proc/self/fd").iterdir())
        yield [str(place.readlink()).partition(":")[0] for place in places if place.is_symlink()]  # not the listing's

    with (tmp_path / "secret").open("w"):
        (found,) = ConfinedReader(files).ask(None, ERRAND)
    assert found == ["/dev/null", "/dev/null", "/memfd", "socket", "pipe"]


PROGRAM = """
import signal, sys, time
from anytron.base.errors import DataError
from anytron.task.isolation.reader import ConfinedReader, Errand

def compute(call, note):
    sum(range(10**11))
    yield 1

reader = ConfinedReader(compute, compute_s=100)
def answer():
    for _ in reader.ask(None, Errand(DataError, "a", "b", "c")):
        pass
print("asking", flush=True)
import threading
threading.Timer(0.5, lambda: print(reader._child.pid, flush=True)).start()
answer()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_driver_and_reader_at_once(number):
    driver = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout.readline() == b"asking\n"
    child = driver.stdout.readline().decode().strip()
    driver.send_signal(number)
    assert driver.wait(10) != 0
    end = time.monotonic() + 10
    try:
        while Path(f"/proc/{child}").exists():
            with suppress(OSError):
                if " Z " in Path(f"/proc/{child}/stat").read_text():
                    break
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    driver.stdout.close()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=st.just(timezone.utc) | st.none())
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
@example({"\0path": "/etc/passwd"})
@example([b"", {"bytes": 0}, {"\0bytes": 7}])
def test_plain_data_come_back_as_they_were(value):
    assert unpacked(packed(value)) == value


def test_halves_of_letters_paths_and_marks_come_back():
    value = [
        {"a": "\ud800", "b": Path("/x/\u00e9"), "c": date(1, 1, 1)},
        clock(1),
        timedelta(-1),
        Decimal("1.10"),
        b"\0",
    ]
    assert unpacked(packed(value)) == value
    assert unpacked(packed(datetime(2020, 1, 1))) == datetime(2020, 1, 1)


@pytest.mark.parametrize("lengths", [[10, -10] * 5, [True], [1.5]])
def test_lengths_that_are_none_make_nothing_larger(lengths):
    header, body = json.dumps(["m", *lengths]).encode(), b"{}"
    frame = b"".join(part for one in (header, body) for part in (struct.pack("<Q", len(one)), one)) + bytes(10)
    with pytest.raises(ValueError, match="a length in the header is not an integer"):
        unpacked(frame)


@given(st.binary(max_size=200) | st.binary(max_size=64).map(lambda tail: packed(["value", b"abc"])[:-5] + tail))
def test_whatever_else_comes_is_data_or_refused(data):
    with suppress(ValueError):
        unpacked(data)

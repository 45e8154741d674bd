"""The common code of all processes that run a user's code: start-up, and the loop over calls.

The first message is plain JSON and names the function to call. Then follow, again and again, a list of tokens in JSON
and a pickled call for each of them. All answers are JSON, because a process that has run a user's code is not trusted.
Each answer repeats the token of its call. So text that such code writes into the channel is not taken for an answer,
and later answers do not shift to other calls.
Importing this module does not import torch; the user's code may import it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import pickle
import resource
import select
import signal
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.terminal import make_output_visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Answer = Callable[[dict[str, Any]], None]

STACK_SIGNAL = signal.SIGUSR1
"""Makes the process write the stacks of all its threads to its log, whatever it does, when a call takes too long."""
GIB = 1 << 30


def enter(channel: int, lifeline: int) -> tuple[Connection, dict[str, Any]]:
    """Set up this process: it ends with the driver, prints its stacks if it hangs, and has a memory limit.

    Args:
        channel: This process's end of a socket pair.
        lifeline: Reading end of a pipe that is never written to; the driver holds the other end.

    Returns:
        The channel, and the first message of the driver.
    """
    for descriptor in (channel, lifeline):
        os.set_inheritable(descriptor, False)
    end_with_driver(lifeline)
    make_output_visible()
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    connection = Connection(channel)
    start: dict[str, Any] = json.loads(connection.recv_bytes())
    os.set_inheritable(start["progress"], False)
    sys.path[:] = start["sys_path"]
    _limit_memory(start["memory_gib"])
    return connection, start


def calls(connection: Connection, start: dict[str, Any]) -> Iterator[tuple[Any, Answer]]:
    """Report that this process is ready, and yield the driver's calls until it is gone, each with a reply function.

    The arguments are the results of :func:`enter`. Answers are plain values.
    """
    _send(connection, start["token"], {"ready": True})
    while True:
        try:
            tokens = json.loads(connection.recv_bytes())
            frames = [connection.recv_bytes() for _ in tokens]
        except EOFError:
            return
        for token, frame in zip(tokens, frames, strict=True):
            answer = partial(_send, connection, token)
            try:
                call = pickle.loads(frame)  # noqa: S301 - the driver made it
            except Exception as error:  # noqa: BLE001 - whatever the prompts' data is made of
                answer({"unreadable": f"{type(error).__name__}: {error}"})
                continue
            yield call, answer


def _send(connection: Connection, token: str, record: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps([token, record]).encode())


def end_with_driver(lifeline: int) -> None:
    """Let the kernel kill this process group when the driver's end of the lifeline closes.

    A thread that waits for that, as in the processes of engines, is not enough: a function can hold the interpreter's
    lock for ever (usually a regular expression that backtracks).
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(lifeline, select.POLLHUP)
    if ended.poll(0):  # before the kernel was asked, so that it sends no signal
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _limit_memory(limit_gib: float | None) -> None:
    """Limit what the process may allocate, and let it be the first to go if the machine runs out of memory.

    Not ``RLIMIT_AS``: libraries such as torch reserve far more addresses than they use.
    """
    if limit_gib is not None:
        limit = int(limit_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

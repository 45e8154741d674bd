"""The signal handling of every command that starts processes."""

from __future__ import annotations

import contextlib
import signal
from typing import NoReturn

import typer

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def handle_signals() -> None:
    """Turn SIGTERM, SIGHUP and SIGUSR1 into SystemExit, so that no worker process and no weight file is left behind.

    SIGHUP stays ignored under nohup. While steps are trained, the run handles these signals itself.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def _terminate(number: int, frame: object) -> NoReturn:
    del frame
    with contextlib.suppress(OSError):  # a terminal that is gone
        typer.echo(f"terminated by {signal.Signals(number).name}: what was written so far is kept", err=True)
    raise SystemExit(128 + number)

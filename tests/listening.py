"""What processes of a run listen on, and what the table of SECURITY.md says of it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from tests.core.workers.executor.processes import LOOPBACK, listeners, offspring
from tests.house import ROOT

EVERYWHERE = {"0.0.0.0", "::"}
HEADER = "| run | process | what listens | address | port | who may use it | test |"


def table(text=None):
    """The table's rows: cells of each."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8") if text is None else text
    rows = text.partition(HEADER)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def check(run, found, text=None):
    """Compare what was found with the table's rows of such a run.

    Args:
        run: The rows' first cell.
        found: Processes and addresses, as ``described`` gives them.
        text: Of SECURITY.md.
    """
    promised = {(process, address) for name, process, _, address, *_ in table(text) if name == run}
    assert promised, f"SECURITY.md has no row of a run: {run}"
    assert (found - promised, promised - found) == (set(), set()), "not in the table; in the table alone"


def described(processes, own=None, but=None):
    """Say where processes listen, in the table's words.

    Args:
        processes: Ids, and what the table calls the processes.
        own: The machine's address in the cluster.
        but: Addresses and ports where this process listened before the run: earlier tests leave process groups.
    """
    assert but is not None or os.getpid() not in processes, "this process has run other tests"
    found = set()
    for pid, process in processes.items():
        with contextlib.suppress(OSError):  # it has ended
            found |= {(process, word(address, own)) for address, _ in listeners(pid) - (but or set())}
    return found


def word(address, own=None):
    """Say where an address is, in the table's words."""
    if address in LOOPBACK:
        return "loopback"
    return "all" if address in EVERYWHERE else "the machine's own" if address == own else address


def of_run(driver, output):
    """Ids and names of a run's processes: the driver, and those that write its logs."""
    found = {driver: "driver"}
    for written in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            log = written.readlink()
            if log.parent == output / "logs":
                name = log.name.partition("-")[0]
                found[int(written.parts[2])] = "training rank" if name == "trainer" else name
    return found


@contextlib.contextmanager
def watched(driver, output):
    """Give a set that has, in the end, all that processes of a run have been seen to listen on."""
    seen, over = set(), threading.Event()

    def watch():
        while not over.wait(0.5):
            with contextlib.suppress(OSError):  # one has ended
                seen.update(described(dict.fromkeys(offspring(driver), "child of the driver") | of_run(driver, output)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()

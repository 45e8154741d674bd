"""The agent that runs a program (``environment.command``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from anytron.base.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.task.environments.protocol import AgentTask

TASK_FILE = "ANYTRON_TASK_FILE"
"""Environment variable of the program: file with its task, as JSON."""
MODEL_NAME = "ANYTRON_MODEL"
"""Environment variable of the program: name of the model in requests."""
AS_VARIABLES = ("base_url", "api_key", "model")
"""Fields of the task that the program gets as environment variables, and not in the file."""

PASSES = 100
"""How often the group is searched: a process may fork during a pass, and one in the kernel may not end at once."""


def run_command(task: AgentTask, command: Sequence[str]) -> None:
    """Run a program to its end. The program sends its reward by ``POST /v1/reward``.

    The program's output goes into the log of this process. Processes of this process group that the program leaves
    behind are killed. A time-out kills the program as well.

    Raises:
        ResourceError: The machine has run out of memory, processes or files.
        RuntimeError: The program could not be started, or ended with another status than 0.
    """
    own = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, MODEL_NAME: task.model}
    told = {one.name: getattr(task, one.name) for one in fields(task) if one.name not in AS_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="anytron-agent-") as directory:
        file = Path(directory) / "task.json"
        file.write_text(json.dumps({**told, "data": dict(task.data)}, default=str), encoding="utf-8")
        try:
            done = subprocess.run(  # noqa: S603 - the command is the user's
                list(command), env={**os.environ, **own, TASK_FILE: str(file)}, stdin=subprocess.DEVNULL, check=False
            )
        except OSError as error:
            raise exhausted(error) or RuntimeError(f"{command[0]} could not be started: {error}") from error
        finally:
            _end_others_of_group()
    if done.returncode:
        how = f"by signal {-done.returncode}" if done.returncode < 0 else f"with status {done.returncode}"
        raise RuntimeError(f"{command[0]} ended {how}; its output is in environment-N.log, in the run's folder logs")


def _end_others_of_group() -> None:
    """Kill the other processes of this process's group, if it leads the group, as processes of environments do."""
    if os.getpgrp() != os.getpid():
        return
    for _ in range(PASSES):
        found = False
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                state, _parent, group = (
                    file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
                )
                process = int(file.parent.name)
                if int(group) == os.getpgrp() and process != os.getpid() and state != "Z":
                    os.kill(process, signal.SIGKILL)
                    found = True
        if not found:
            return

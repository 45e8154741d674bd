"""A run of the tests of faults: start it, watch it, start it again, and compare what it leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults import saboteur

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TASK = Path(__file__).with_name("task.yaml")
STEPS = 6
"""Enough for a series of blows that begins late, because the first checkpoint is written in the background."""
LIFE_S = 1200.0
"""Seconds until a life of a run must have ended, with all restarts of a series and on a busy machine."""
POLL_S = 0.05
TIMES = ("time/", "throughput/", "memory/", "checkpoint/")
"""Beginnings of metrics that two equal runs need not share."""


@dataclass
class Life:
    """One start of a run, until its driver has ended.

    Attributes:
        process: The driver.
        output: The file with everything that it writes.
        began: When, in seconds of the monotonic clock.
    """

    process: subprocess.Popen[bytes]
    output: Path
    began: float

    @property
    def text(self) -> str:
        """Everything that the driver has written."""
        return self.output.read_text(errors="replace")

    @property
    def crashed(self) -> bool:
        """Whether the driver has ended with an exception of Python's, and not with a message for people."""
        return any(line.startswith("Traceback") for line in self.text.splitlines())


@dataclass
class Run:
    """A run in a directory, with what a saboteur will do to it.

    Attributes:
        directory: An empty directory, for the run's own (``run``) and for the saboteur.
        blows: What happens to it.
        settings: Overrides of the configuration.
        steps: Training steps.
        task: The configuration.
        lives: The starts so far.
        moments: Seconds of the monotonic clock at which a number of steps was first seen in ``metrics.jsonl``.
    """

    directory: Path
    blows: Sequence[saboteur.Blow] = ()
    settings: Sequence[str] = ()
    steps: int = STEPS
    task: Path = TASK
    lives: list[Life] = field(default_factory=list)
    moments: list[tuple[float, int]] = field(default_factory=list)

    @property
    def output(self) -> Path:
        """The run's own directory."""
        return self.directory / "run"

    @cached_property
    def _variables(self) -> Mapping[str, str]:
        return saboteur.prepare(self.directory, self.blows)

    def start(self, *settings: str, into: int | None = None, **variables: str) -> Life:
        """Start or continue the run; what it writes goes to a log, or to the descriptor ``into``."""
        output = self.directory / f"life-{len(self.lives) + 1}.log"
        command = [
            *(sys.executable, "-m", "anytron", "train", str(self.task), "resume=auto"),
            *(f"trainer.total_steps={self.steps}", f"trainer.output_dir={self.output}", *self.settings, *settings),
        ]
        environment = {**os.environ, **self._variables, "OMP_NUM_THREADS": "1", **variables}
        with output.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=into or log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        (self.directory / "driver.pid").write_text(str(process.pid))
        self.lives.append(Life(process, output, time.monotonic()))
        return self.lives[-1]

    def wait(self, life: Life, until: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the end of a life, or for an event; return the driver's exit status, None while it lives.

        Raises:
            TimeoutError: It takes too long.
        """
        deadline = time.monotonic() + LIFE_S
        while life.process.poll() is None and not until():
            steps = len(self.metrics())
            if not self.moments or self.moments[-1][1] != steps:
                self.moments.append((time.monotonic(), steps))
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not ended within {LIFE_S:g} s; see {life.output}")
            time.sleep(POLL_S)
        return life.process.returncode

    def metrics(self) -> list[dict[str, Any]]:
        """Read the complete lines of ``metrics.jsonl``."""
        with suppress(FileNotFoundError):
            text = (self.output / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.split("\n")[:-1]]
        return []

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is saved."""
        return len(self.metrics()) == self.steps and (self.output / "hf" / "model.safetensors").is_file()

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, the oldest first."""
        return sorted(path.parent for path in (self.output / "checkpoints").glob("step-*/manifest.json"))

    def struck(self) -> list[float]:
        """Say when each blow was struck, in seconds of the clock of :attr:`moments`; none if it was not yet."""
        markers = (self.directory / f"blow-{number}" for number in range(len(self.blows)))
        return [_written(marker) for marker in markers if marker.exists()]

    @property
    def noticed(self) -> float:
        """When the driver has last noticed the loss of a process, in seconds of the same clock; 0.0 if it has not."""
        losses = self.output / "losses.jsonl"
        return _written(losses) if losses.exists() else 0.0

    def leftovers(self, patience_s: float = 10.0) -> list[int]:
        """List the processes of the run that are still there after a while."""
        deadline = time.monotonic() + patience_s
        while (left := list(self.processes())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def end(self) -> None:
        """End what is left of it, whatever has happened."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for life in self.lives:
            with suppress(subprocess.TimeoutExpired):
                life.process.wait(10)

    def processes(self) -> dict[int, str]:
        """Find all processes of the run by number: role and rank of each, or else what it runs."""
        known = {path.read_text(): path.stem for path in self.directory.glob("*.pid")}
        numbers = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
        ours = [number for number in numbers if _is_ours(int(number), self.directory)]
        return {int(number): known.get(number) or _command(int(number)) for number in ours}


def _written(file: Path) -> float:
    """When a file was last written, in seconds of the monotonic clock."""
    return time.monotonic() - (time.time() - file.stat().st_mtime)


def _is_ours(process: int, directory: Path) -> bool:
    """Whether a process was started for the run in a directory: it has inherited the saboteur's variable."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return state != "Z" and f"{saboteur.VARIABLE}={directory}".encode() in variables


def _command(process: int) -> str:
    """Name the module of Anytron that a process runs, or else its command."""
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    module = re.search(r"anytron[\w.]*\.\w+", line)
    return module[0] if module else line.strip()


@dataclass(frozen=True)
class Difference:
    """What two finished runs do not share.

    Attributes:
        metrics: The largest absolute difference between metrics of the same step; infinite if they have others.
        weights: The largest absolute difference between final weights; infinite if tensors differ in name or shape.
        same_bytes: Whether the files of final weights are the same, byte for byte.
    """

    metrics: float
    weights: float
    same_bytes: bool

    @property
    def none(self) -> bool:
        """Whether nothing differs but times."""
        return self.metrics == 0.0 and self.same_bytes

    def __str__(self) -> str:
        if self.none:
            return "none: metrics and weights are the same, bit for bit"
        return f"metrics {self.metrics:.1e}, weights {self.weights:.1e}"

    @classmethod
    def between(cls, run: Run, other: Run) -> Difference:
        """Compare two finished runs."""
        from safetensors.torch import load_file

        files = [one.output / "hf" / "model.safetensors" for one in (run, other)]
        first, second = map(load_file, files)
        apart = float("inf")
        if {name: value.shape for name, value in first.items()} == {name: v.shape for name, v in second.items()}:
            apart = max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
        same_bytes = files[0].read_bytes() == files[1].read_bytes()
        return cls(_metrics_apart(run.metrics(), other.metrics()), apart, same_bytes)


def _metrics_apart(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    kept = [[{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines] for lines in (first, second)]
    if [list(line) for line in kept[0]] != [list(line) for line in kept[1]]:
        return float("inf")
    pairs = [(line[name], twin[name]) for line, twin in zip(*kept, strict=True) for name in line]
    return max((abs(one - other) for one, other in pairs if one != other), default=0.0)

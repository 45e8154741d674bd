"""A Ray cluster on machines, and runs of ``examples/grpo_sort.yaml`` on it."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.house import ROOT
from tests.machines.namespaces import SHARED, address, until

if TYPE_CHECKING:
    from tests.machines.namespaces import Machines, Process

EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
RAY = str(Path(sys.executable).with_name("ray"))
HEAD = 1
"""The machine of the driver and of Ray's head. No rank is placed there."""
TIMED = ("time/", "throughput/", "memory/")
"""Beginnings of the names of metrics that no two runs share."""
OURS = ("anytron.workers", "anytron train", "ray::Agent")
"""What the command lines of a run's processes hold."""
START_S = 150.0
LIFE_S = 400.0
SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ranks are as urgent as the driver: Ray would make them wait for whatever else runs here. And Ray notices a machine
that is cut off after some 25 s; by default it takes more than a minute."""


class Run:
    """A run of the example, whose driver is on a machine.

    Args:
        machines: The machines.
        run: Its name, of which no other run is.
        settings: Overrides of the configuration.
        command: What ``anytron`` does.
        driver: The machine of the driver.
        variables: Further environment variables of the driver.
    """

    def __init__(
        self,
        machines: Machines,
        run: str,
        *settings: str,
        command: str = "train",
        driver: int = HEAD,
        **variables: str,
    ) -> None:
        self._machines = machines
        self._driver = driver
        self.output = machines.shared / run
        self._said = machines.shared / f"{run}.out"
        line = [sys.executable, "-m", "anytron", command, str(EXAMPLE), f"trainer.output_dir={SHARED / run}", *settings]
        with self._said.open("wb") as into:
            self.process = machines.start(driver, *line, into=into, **variables)

    @property
    def text(self) -> str:
        """What it has written to the terminal."""
        return self._said.read_text(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step so far, without times, throughput and memory."""
        file = self.output / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [{key: value for key, value in json.loads(line).items() if not key.startswith(TIMED)} for line in lines]

    def reach(self, step: int, within_s: float = START_S) -> None:
        """Wait until a step is done."""
        self._until(lambda: len(self.metrics()) >= step, within_s, f"step {step}")

    def say(self, words: str, within_s: float) -> None:
        """Wait until it has written some words to the terminal."""
        self._until(lambda: words in self.text, within_s, f"'{words}'")

    def losses(self) -> int:
        """How many times a process was lost so far."""
        file = self.output / "losses.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def lose(self, before: int, within_s: float) -> None:
        """Wait until more processes were lost than ``before``."""
        self._until(lambda: self.losses() > before, within_s, "a loss")

    def end(self, within_s: float = LIFE_S) -> int:
        """Wait for its end; return the exit status."""
        try:
            until(lambda: self.process.poll() is not None, within_s, "the end of the run")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None
        return self.process.returncode

    def succeed(self, within_s: float = LIFE_S) -> Run:
        """Wait for its end, which must be a good one."""
        assert self.end(within_s) == 0, self.text
        return self

    def fail(self, within_s: float) -> str:
        """Wait for its end, which must not be a good one; return what it wrote, without what wrapped lines add."""
        assert self.end(within_s) == 1, self.text
        return " ".join(self.text.split())

    def worker(self, role: str) -> tuple[int, Process]:
        """Find the machine and the process of a worker, for example of ``trainer-1``; wait for it if need be."""
        found: list[tuple[int, Process]] = []

        def look() -> bool:
            found.extend(
                (machine, one)
                for machine in self._machines.numbers
                for one in self._machines.processes(machine, "anytron.workers")
                if one.output.endswith(f"/{self.output.name}/logs/{role}.log")
            )
            return bool(found)

        self._until(look, 30.0, role)
        return found[0]

    def _until(self, condition: Any, within_s: float, what: str) -> None:
        try:
            until(lambda: condition() or self.process.poll() is not None, within_s, what)
            assert condition(), f"it ended before {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None


class Cluster:
    """Ray on machines: its head on the first, which has no processors for ranks, and one processor on each other.

    Args:
        machines: The machines.
        resources: Resources of each machine besides processors, as ``ray start`` takes them.
        head: Processors of the first machine.
    """

    def __init__(self, machines: Machines, resources: str = "{}", head: int = 0) -> None:
        self.machines = machines
        self._resources = resources
        self._join(HEAD, "--head", "--port=6379", f"--num-cpus={head}", "--include-dashboard=false")
        with ThreadPoolExecutor() as threads:  # each takes seconds
            list(threads.map(self.join, machines.numbers[1:]))

    def join(self, machine: int, **variables: str) -> None:
        """Start Ray on a machine, with one processor."""
        options = (f"--address={address(HEAD)}:6379", "--num-cpus=1", f"--resources={self._resources}")
        self._join(machine, *options, **variables)

    def run(self, run: str, *settings: str, **further: Any) -> Run:
        """Start a run in the cluster."""
        return Run(self.machines, run, "executor.kind=ray", *settings, **further)

    def left(self) -> dict[int, list[str]]:
        """The processes of runs that are still there, by machine."""
        found = {
            machine: [one.command[:120] for words in OURS for one in self.machines.processes(machine, words)]
            for machine in self.machines.numbers
        }
        return {machine: commands for machine, commands in found.items() if commands}

    def clear(self, within_s: float = 15.0) -> None:
        """Check that no process of a run is left on any machine."""
        deadline = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left

    def sweep(self) -> None:
        """End what a failed test has left."""
        for machine in self.machines.numbers:
            for words in OURS:
                for process in self.machines.processes(machine, words):
                    process.kill()

    def renew(self, machine: int, **variables: str) -> None:
        """Replace a machine by a new one of the same name and address, as after a repair, and start Ray on it."""
        if self.machines.is_up(machine):
            self.machines.off(machine)
        self.machines.up(machine)
        self.join(machine, **variables)

    def _join(self, machine: int, *options: str, **variables: str) -> None:
        self.machines.on(
            machine,
            *(RAY, "start", f"--node-ip-address={address(machine)}", "--object-store-memory=80000000"),
            *("--disable-usage-stats", *options),
            **SETTINGS,
            **variables,
        )

"""The one JSON of a run, and the logs beside it: written after every step, so that nothing is lost with the machine."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import figures

if TYPE_CHECKING:
    from pathlib import Path

END_OF_LOG = 3000
LOG_BYTES = 400_000
"""Of one log's end, in the file of all logs."""


class Results:
    """What is known so far. An earlier run's is continued: steps come and go by ``--only``.

    Args:
        work: Where the state and the steps' logs are kept.
        out: Where ``results.json``, ``summary.txt`` and ``logs.txt`` go.
        order: The steps' names, the most important first.
    """

    def __init__(self, work: Path, out: Path, order: list[str]) -> None:
        self._state = work / "results.json"
        self._logs = work / "logs"
        self._out = out
        self._order = order
        self.facts: dict[str, Any] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        for folder in (self._logs, out):
            folder.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            before = json.loads(self._state.read_text(encoding="utf-8"))
            self.steps = before.pop("steps")
            self.facts = before

    def logs(self, step: str) -> tuple[Path, Path]:
        """Files for a step's standard and error output."""
        return self._logs / f"{step}.out", self._logs / f"{step}.err"

    def end_of_log(self, step: str) -> str:
        """The end of what a step wrote, its error output last."""
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in self.logs(step) if path.exists())
        return "\n".join(text[-END_OF_LOG:].strip() for text in texts)

    def write(self) -> None:
        """Write everything, the most important first."""
        steps = {name: self.steps[name] for name in self._order if name in self.steps}
        headlines = dict(pair for name, step in steps.items() for pair in figures.numbers(step.get("figures"), name))
        whole = {"headlines": headlines, **{k: v for k, v in self.facts.items() if k != "headlines"}, "steps": steps}
        text = json.dumps(whole, indent=2)
        beside = self._state.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self._state)
        shutil.copyfile(self._state, self._out / "results.json")
        (self._out / "summary.txt").write_text(self.summary() + "\n", encoding="utf-8")
        with (self._out / "logs.txt").open("w", encoding="utf-8") as file:
            for name in steps:
                for path in self.logs(name):
                    if path.exists():
                        end = path.read_bytes()[-LOG_BYTES:].decode(errors="replace")
                        file.write(f"===== {path.name}\n{end}\n")

    def summary(self) -> str:
        """A line for each step, then its figures; what failed is at the end, where a terminal shows it."""
        lines, failures = [], []
        for name in self._order:
            step = self.steps.get(name)
            if step is None:
                continue
            took = f" in {step['seconds']:.0f} s" if "seconds" in step else ""
            lines.append(f"{name:18} {step['status']}{took}")
            lines += [f"    {key.partition('.')[2]:40} {value:.6g}" for key, value in
                      figures.numbers(step.get("figures"), name)]  # fmt: skip
            if step["status"] not in ("passed", "absent"):
                failures += [f"----- {name}: {step.get('error', '')}", step.get("end_of_log", "")]
        return "\n".join([*lines, *failures])

"""Does a broken platform change a number in a run, and if it does, does ``anytron verify`` alone say so?

The run is trained for two steps on the platform and on the processor, which give the same numbers to the last digit if
they compute the same. One that refuses or ends such a run is caught by the run. Where numbers are drawn at random,
those of another device are as good: such a run is compared with the platform's own, of which nothing is recomputed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from anytron.base.errors import AnytronError
from anytron.base.results import in_one_line
from anytron.config.diagnostics import refuse
from anytron.proof.verification.comparisons import FACTORS
from anytron.proof.verification.hugging_face import quiet
from anytron.record.tracking.progress import Progress
from anytron.run.preflight.open_run import open_run
from anytron.workers.executor import process as processes
from anytron_cpu import CpuPlatform
from tests.conformance import (
    attention_mutants,
    device_mutants,
    engine_mutants,
    invariance_mutants,
    kernel_mutants,
    lasting_ranks,
    no_rows_mutants,
    sequence_mutants,
)
from tests.conformance.lasting_ranks import LastingProcesses
from tests.conformance.mutant import Mutant, Unbroken, mutants_of
from tests.conformance.remembered import remember
from tests.conformance.runs import ROOT, RUNS, SAME, configuration, write_models
from tests.warm_python import WarmPopen

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LIMIT = FACTORS["float32"]
"""Relative difference of a metric that is no rounding: as ``anytron verify`` takes it."""
LIMITS = {"bfloat16": FACTORS["bfloat16"]}
"""The same of runs that round more."""
OF_A_MACHINE = ("time/", "throughput/", "memory/")
"""Beginnings of the names of metrics that are others in every run."""
WHERE = {
    device_mutants: ("qwen3", "tp2", "dropout"),
    sequence_mutants: ("qwen3", "bshd", "cp2", "moe", "delta-net", "delta-net, bshd"),
    attention_mutants: ("qwen3", "bshd", "cp2", "mla", "dropout"),
    kernel_mutants: ("qwen3", "tp2", "delta-net", "mla", "moe", "bfloat16"),
    no_rows_mutants: ("cp2", "delta-net"),
    invariance_mutants: (),  # other bits are no other numbers
    engine_mutants: ("qwen3", "bshd", "tp2", "pp2", "cp2", "moe", "dropout", "critic", "mtp"),
}
"""The runs in which each kind of mutant has its chance: until one of them has other numbers."""
OF_A_PROCESS = ("runtime", "runtime_env", "patch_model", "accelerator", "options_model", "limits", "decisions")
"""A platform that has one of these for itself gets processes of its own."""


@dataclass(frozen=True)
class Finding:
    """What a platform does to a run.

    Attributes:
        mutant: Name of the platform's class.
        run: The first run that it changes; None if it changes none.
        how: Which metric differs, or what ended the run.
        ended: The run did not take place, or ended by itself.
        checks: What ``anytron verify`` says of that run: the checks that fail, with their details.
    """

    mutant: str
    run: str | None = None
    how: str = ""
    ended: bool = False
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        """Whether other numbers pass."""
        return self.run is not None and not self.ended and not self.checks


@dataclass(frozen=True)
class Healthy:
    """What the processor makes of a run.

    Attributes:
        steps: The metrics of each step.
        checks: The checks of ``anytron verify`` that fail, with their details.
    """

    steps: list[dict[str, float]]
    checks: dict[str, str]


class Watcher(Progress):
    """Shows nothing."""

    def begins(self, what):
        pass

    def made(self, result):
        pass


class Laboratory:
    """Runs on the processor and on mutants, in processes that last. A context manager: leaving ends them.

    Args:
        scratch: A directory.
        runs: The runs by name.
    """

    left_out: Collection[str] = ()
    """Checks that are not made when a run is verified."""

    def __init__(self, scratch: Path, runs: Mapping[str, tuple[str, Mapping[str, Any]]] = RUNS) -> None:
        self._scratch, self._runs = scratch, runs
        self._mutant: type[Mutant] = Unbroken
        self._healthy: dict[str, list[dict[str, float]]] = {}
        self._own = False  # whether the platform that is looked at needs processes of its own

    def __enter__(self):
        with quiet():
            write_models(self._scratch / "models")
        self._undo = contextlib.ExitStack()
        patches = self._undo.enter_context(pytest.MonkeyPatch.context())
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patches.setenv("PYTHONPATH", os.pathsep.join(path))
        patches.setenv(lasting_ranks.FOLDER, str(self._scratch / "platforms"))
        patches.setattr(subprocess, "Popen", WarmPopen)
        patches.setattr(processes, "START_WORKER", lasting_ranks.START)
        remember(patches.setattr)
        self._undo.callback(LastingProcesses.end_all)
        return self

    def __exit__(self, *exception):
        self._undo.close()

    def look(self, mutant: type[Mutant], runs: tuple[str, ...] = ()) -> Finding:
        """Train runs, or those of its kind, until one changes, and verify that one."""
        runs = runs or WHERE[sys.modules[mutant.__module__]]
        with self._installed(mutant):
            for run in runs:
                try:
                    expected = self._train(SAME[run], mutant.name) if run in SAME else self._of_the_processor(run)
                    steps = self._train(run, mutant.name)
                except (AnytronError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                    self._check_that_the_processor_still_runs(run)
                    return Finding(mutant.__name__, run, _said(error), ended=True)
                how = difference(expected, steps, LIMITS.get(run, LIMIT))
                if how:
                    return Finding(mutant.__name__, run, how, checks=self._verify(run, mutant.name))
        return Finding(mutant.__name__)

    def healthy(self, run: str) -> Healthy:
        """Train and verify a run on the processor."""
        self._own = False
        return Healthy(self._of_the_processor(run), self.verify(Unbroken, run))

    def know(self, run: str, healthy: Healthy) -> None:
        """Take what another laboratory has found of a run on the processor: it is not trained here again."""
        self._healthy[run] = healthy.steps

    def verify(self, mutant: type[Mutant], run: str) -> dict[str, str]:
        """Verify a run; give the checks that fail, with their details."""
        with self._installed(mutant):
            return self._verify(run, mutant.name)

    def _of_the_processor(self, run: str) -> list[dict[str, float]]:
        if run not in self._healthy:
            if self._own:
                LastingProcesses.end_all()  # they may have a mutant's patches, and a mutant needs its own
            self._healthy[run] = self._train(run, CpuPlatform.name)
            if self._own:
                LastingProcesses.end_all()
        return self._healthy[run]

    def _check_that_the_processor_still_runs(self, run: str) -> None:
        """What ends a run may be something else than its platform, and must not count as one that is caught."""
        LastingProcesses.end_all()
        again = self._train(run, CpuPlatform.name)
        assert not difference(self._of_the_processor(run), again, LIMITS.get(run, LIMIT)), run

    def _train(self, run: str, platform: str) -> list[dict[str, float]]:
        from anytron.run.trainer.loop import train

        with self._opened(run, platform) as opened:
            with LastingProcesses(opened.config, opened.session) as executor:
                train(opened.config, executor, Watcher())
            metrics = Path(opened.config.trainer.output_dir, "metrics.jsonl").read_text(encoding="utf-8")
            return [json.loads(line) for line in metrics.splitlines()]

    def _verify(self, run: str, platform: str) -> dict[str, str]:
        from anytron.proof.verification import checks

        made = tuple(one for one in checks.CHECKS if one.name not in self.left_out)
        with self._opened(run, platform) as opened, pytest.MonkeyPatch.context() as patches:
            patches.setattr(checks, "CHECKS", made)
            Path(opened.config.trainer.output_dir).mkdir()
            try:
                report = checks.verify(opened.config, opened.session, LastingProcesses, Watcher())
            except AnytronError as error:
                return {"start": in_one_line(error)}
            return {one.name: one.detail for one in report.results if one.status == "failed"}

    @contextlib.contextmanager
    def _opened(self, run: str, platform: str):
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            file = Path(folder, "run.yaml")
            tree = configuration(run, platform, Path(folder, "output"), self._scratch / "models", self._runs)
            file.write_text(yaml.safe_dump(tree), encoding="utf-8")
            with self._mutant.breaks("driver") if platform == self._mutant.name else contextlib.nullcontext():
                opened = open_run(file, [])
                refuse(opened.diagnostics)
                yield opened

    @contextlib.contextmanager
    def _installed(self, mutant: type[Mutant]):
        folder = self._scratch / "platforms" / mutant.name
        info = folder / f"{mutant.name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        lines = ["[anytron.platforms]", f"{mutant.name} = {mutant.__module__}:{mutant.__name__}", "[anytron.plugins]"]
        lines += [f"{name} = {mutant.__module__}:{type(one).__name__}" for name, one in mutant.extensions.items()]
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {mutant.name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        own = self._own = any(
            getattr(mutant, name, None) is not getattr(CpuPlatform, name, None) for name in OF_A_PROCESS
        )
        sys.path.append(str(folder))
        self._mutant = mutant
        if own:
            LastingProcesses.end_all()
        try:
            yield
        finally:
            if own:
                LastingProcesses.end_all()
            device_mutants.put_back()
            sys.path.remove(str(folder))


def difference(expected: list[dict[str, float]], found: list[dict[str, float]], limit: float = LIMIT) -> str:
    """Say which metric differs most; nothing if none differs by more than the limit, relatively."""
    worst, where = 0.0, ""
    for step, (wanted, got) in enumerate(zip(expected, found, strict=True), start=1):
        for name in wanted.keys() | got.keys():
            if name.startswith(OF_A_MACHINE):
                continue
            off = abs(got.get(name, math.nan) - wanted.get(name, math.nan)) / max(1.0, abs(wanted.get(name, 0.0)))
            off = math.inf if math.isnan(off) else off
            if off > max(worst, limit):
                worst, where = off, f"{name} of step {step} by {off:.2g}"
    return where


def _said(error: Exception) -> str:
    if isinstance(error, AnytronError):
        return in_one_line(error)
    return f"{type(error).__name__}: {error}"


def every_mutant() -> list[type[Mutant]]:
    """All of them."""
    return [mutant for module in WHERE for mutant in mutants_of(module)]


def look_at_all(advance) -> list[Finding]:
    """Look at every mutant; ``advance`` is called after each, with its finding."""
    findings = []
    with tempfile.TemporaryDirectory() as scratch, Laboratory(Path(scratch)) as laboratory:
        for mutant in every_mutant():
            findings.append(laboratory.look(mutant))
            advance(findings[-1])
    return findings


def counted(findings: list[Finding]) -> dict[str, object]:
    """Count: a run that a platform ends is no changed number, and is caught by the run itself."""
    changing = [one for one in findings if one.run is not None and not one.ended]
    return {
        "mutants": len(findings),
        "end_a_run": sum(one.ended for one in findings),
        "change_a_run": len(changing),
        "caught_by_verify": sum(not one.missed for one in changing),
        "missed": sorted(one.mutant for one in changing if one.missed),
    }


def row(finding: Finding) -> str:
    """Say what was found, in one line."""
    if finding.run is None:
        return f"{finding.mutant}: changes no number"
    caught = f"caught by {', '.join(finding.checks)}" if finding.checks else "passes anytron verify"
    return f"{finding.mutant}: in {finding.run} {finding.how}; {'the run ends' if finding.ended else caught}"

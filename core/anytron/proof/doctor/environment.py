"""The environment variables that change how a run behaves."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anytron.base.results import Result
from anytron.config.schema import default_run
from anytron.device.hooks.types import ProcessInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.proof.doctor.subject import Subject

PREFIXES = ("ANYTRON_", "GLOO_", "HF_", "MKL_", "OMP_", "PYTHONPATH", "PYTORCH_", "RAY_", "TORCH_", "TRANSFORMERS_")
"""Beginnings of names, besides those of the platform."""
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Parts of names whose values are shown to nobody: the output goes into reports."""


def examine(subject: Subject) -> Iterator[Result]:
    """Give those that are set, and those that plugins will set for a training rank."""
    prefixes: tuple[str, ...] = PREFIXES
    wanted: Mapping[str, str] = {}
    if subject.session is not None:
        platform = subject.session.platform
        prefixes = (*PREFIXES, *platform.environment_prefixes, *filter(None, [platform.visible_devices_variable]))
        run = subject.run or default_run()
        process = ProcessInfo("trainer", world_size=run.parallel.world_size)
        wanted = subject.session.hooks.runtime_env(process, run)
    for name, value in sorted(os.environ.items()):
        if name.startswith(prefixes) or name in wanted:
            secret = any(part in name.upper() for part in SECRETS)
            yield Result(f"environment.{name}", "passed", "(set)" if secret else value)
    for name, value in sorted(wanted.items()):
        if name not in os.environ:
            yield Result(f"environment.{name}", "passed", f"{value} (a plugin sets it for training ranks)")

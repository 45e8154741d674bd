"""Examine verl for ``anytron doctor``: its release, each of its plugins, and the platform that it selects.

verl logs a plugin that cannot be loaded at level DEBUG and goes on (``verl/__init__.py``), so that training begins on
another platform, or fails far from the cause.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from anytron import Requirement
from anytron.train import examine_requirements
from anytron.verification import Result
from anytron_verl import POLICY, SUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.verification import Subject

TIMEOUT_S = 600


def examine(subject: Subject) -> Iterator[Result]:
    """Import verl in another process, on the platform of the session, and load its plugins one by one."""
    wanted = Requirement("verl", SUPPORTED, f"pip install --no-deps 'verl{SUPPORTED}'")
    (found,) = examine_requirements([("verl", wanted)])
    if found.installed is None:
        yield Result("verl.version", "skipped", "verl is not installed")
        return
    if found.fits:
        yield Result("verl.version", "passed", f"{found.installed} is in {SUPPORTED}")
    else:
        detail = f"{found.installed} is outside of {SUPPORTED}: verl's layouts are used, and its engine was not tested"
        yield Result("verl.version", "warning", detail, found.remedy)
    named = {} if subject.session is None else {"ANYTRON_PLATFORM": subject.session.platform.name}
    yield from _loading(named)


def _loading(variables: Mapping[str, str]) -> Iterator[Result]:
    command = [sys.executable, "-W", "ignore", "-m", "anytron_verl.loading"]
    environment = {**os.environ, **variables}
    done = subprocess.run(  # noqa: S603 - this interpreter, and a module of this package
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        yield Result("verl.import", "failed", last, "python -c 'import verl' shows the whole error")
        return
    answer = json.loads(done.stdout.splitlines()[-1])
    for name, error in answer["loaded"].items():
        if error is None:
            yield Result(f"verl.plugin.{name}", "passed", "verl loads the plugin")
        else:
            detail = f"verl silently continues without the plugin: {error}"
            fix = f"fix the error, uninstall the plugin, or exclude it with {POLICY}"
            yield Result(f"verl.plugin.{name}", "failed", detail, fix)
    for name in answer["left_out"]:
        yield Result(f"verl.plugin.{name}", "warning", f"{POLICY}={os.environ[POLICY]} excludes it", f"unset {POLICY}")
    yield Result("verl.platform", "passed", answer["platform"])

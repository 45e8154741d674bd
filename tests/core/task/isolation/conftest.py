"""A sandbox for tests: run a program in it, as this user and as one without privileges."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import anytron

ROOT = Path(anytron.__file__).parent
PROGRAMS = Path(__file__).with_name("programs.py")
NOBODY = 65534
LIMITS = {"timeout_s": 60.0, "memory_gib": 0.5, "output_mib": 1.0, "site_packages": False}


@pytest.fixture(scope="module")
def package():
    """The sandbox's files where everybody may read them; it needs nothing but the standard library."""
    folder = Path(tempfile.mkdtemp(prefix="anytron-sandbox-"))
    shutil.copytree(ROOT / "task" / "isolation", folder / "anytron" / "task" / "isolation")
    shutil.copy(ROOT / "__init__.py", folder / "anytron")
    shutil.copy(ROOT / "task" / "__init__.py", folder / "anytron" / "task")
    shutil.copy(PROGRAMS, folder)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def someone_else() -> dict:
    """Arguments of subprocess for a user without privileges; none if this is one."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def interpreter() -> str:
    """One that a user without privileges may start."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            done = subprocess.run(
                [python, "-c", "import sys; assert sys.version_info >= (3, 10)"], check=False, **someone_else()
            )
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return sys.executable


USERS = ["full", "full, without privileges", "reduced, without privileges"]


@pytest.fixture(params=USERS)
def run(request, package):
    """Run a program in the sandbox."""
    level, _, privileges = request.param.partition(", ")
    # On the level ``reduced`` root becomes nobody, to whom root's interpreter may be closed.
    python = interpreter() if privileges else sys.executable
    user = someone_else() if privileges == "without privileges" else {}

    def begun(program, given="", umask=0o022, files=0, sabotage="", **limits):
        asked = json.dumps([{"level": level, **LIMITS, **limits}, program, given, files, sabotage])
        return subprocess.Popen(
            [python, "-B", str(package / "programs.py"), asked],
            env={"PYTHONPATH": str(package), "SECRET": "hush"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            umask=umask,
            start_new_session=True,
            **user,
        )

    def started(*program, **limits):
        with begun(*program, **limits) as caller:
            output, errors = caller.communicate()
        assert caller.returncode == 0, errors
        ending = json.loads(output)
        assert "unavailable" not in ending, ending
        return ending

    started.level, started.begun, started.by_root = level, begun, not user and os.geteuid() == 0
    return started

"""The programs of docs/upstream: read them, and run those whose packages are installed.

Programs of one setting are forked from a process that has imported what they share: each alone would import Torch and
Megatron again. ``python tests/docs/reproductions.py SETTING PACKAGE...`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from anytron.device.patches.plan import installed_version

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "upstream").glob("*.md"))
SETTINGS = {
    "": ["megatron.core.models.gpt"],
    "by itself": [],
    "on the layer": ["megatron.core.models.gpt", "peft"],
    "on MindSpeed": [],
    "on MindSpeed-LLM": [],
}
"""What is imported before programs of a setting are forked."""
CHECKOUTS = {"mindspeed": "ANYTRON_MINDSPEED", "mindspeed-llm": "ANYTRON_MINDSPEED_LLM"}
"""What is on no registry: the variables that name checkouts."""
_BLOCK = re.compile(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(
    r"^<!-- shown with: ([^;\n]+?)(?:; ([^\n]+?))? -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Reproduction:
    """One program of the page: the heading above it, what it needs, and its text."""

    title: str
    requirements: tuple[Requirement, ...]
    setting: str
    text: str

    @property
    def package(self) -> str:
        """The package that has the fault."""
        return self.requirements[0].name

    @property
    def is_installed(self) -> bool:
        """Whether all of its packages are here, in these versions; checkouts are named by a variable."""
        return all(
            bool(os.environ.get(CHECKOUTS[one.name])) if one.name in CHECKOUTS else _fits(one)
            for one in self.requirements
        )


def _fits(requirement: Requirement) -> bool:
    version = installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def sections() -> dict[str, str]:
    """The text below each heading of a fault."""
    return {title: text for page in PAGES for title, text in _BLOCK.findall(page.read_text(encoding="utf-8"))}


def reproductions(*packages: str) -> list[Reproduction]:
    """The programs, of these packages or of all."""
    found = [
        Reproduction(title, tuple(map(Requirement, needs.split(", "))), setting, text)
        for title, section in sections().items()
        for needs, setting, text in _PROGRAM.findall(section)
    ]
    return [one for one in found if not packages or one.package in packages]


def outcomes(setting: str, *packages: str) -> dict[str, tuple[int, str]]:
    """Run what is installed of a setting and of these packages: the status and output of each, by its title."""
    quiet = {"PYTHONWARNINGS": "ignore", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none", **quiet}
    command = [sys.executable, __file__, setting, *packages]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {title: (status, said) for title, status, said in json.loads(done.stdout.splitlines()[-1])}


def _forked(text: str) -> tuple[int, str]:
    """Run a program in a fork of this process; its status, and what it printed."""
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = 1
            try:
                exec(compile(text, "program", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:  # noqa: BLE001 - whatever it is, the parent reports it
                traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main(setting: str, *packages: str) -> None:
    """Print the outcomes as JSON, the last of them that of a program whose fault is not there."""
    warnings.simplefilter("ignore")
    chosen = [one for one in reproductions(*packages) if one.setting == setting and one.is_installed]
    if setting.startswith("on "):
        from anytron.device.stack import open_device_stack

        if setting == "on MindSpeed":
            open_device_stack("ascend", {"adaptor": "mindspeed"})
        elif setting == "on MindSpeed-LLM":
            open_device_stack("ascend", engine="mindspeed_llm")
        else:
            open_device_stack("cpu")
    for module in SETTINGS[setting]:
        __import__(module)
    found = [(one.title, *_forked(one.text)) for one in chosen]
    found.append(("no fault", *_forked("assert 1 + 1 == 3\n")))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

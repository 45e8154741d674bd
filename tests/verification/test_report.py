"""What stands in one cell of the table is one line."""

import pytest

from anytron.errors import ConfigError, EngineError, ProcessLost, WorkerError
from anytron.verification.report import in_one_line

TRACEBACK = """Traceback (most recent call last):
  File "kernels.py", line 3, in norm
    raise KeyError("eps")
KeyError: 'eps'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "kernels.py", line 5, in norm
    raise RuntimeError("no eps")
RuntimeError: no eps,
and more of it

after it failed: ranks 1"""


def with_cause(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            WorkerError("Trainer rank 0 failed in update().", where="logs/trainer-0.log", why=TRACEBACK),
            "Trainer rank 0 failed in update(). RuntimeError: no eps, (log: logs/trainer-0.log)",
        ),
        (
            ProcessLost("Trainer rank 1 failed in update(): SIGKILL.", where="trainer-1.log", why="the last lines\nx"),
            "Trainer rank 1 failed in update(): SIGKILL. (log: trainer-1.log)",
        ),
        (
            with_cause(
                EngineError("The loss is not finite.", where="update", why="it is nan,\n  the norm 1"),
                WorkerError("failed", where="trainer-0.log", why=TRACEBACK),
            ),
            "The loss is not finite. it is nan, the norm 1 (log: trainer-0.log)",
        ),
        (ConfigError("There are no prompts.", where="data.source"), "There are no prompts."),
    ],
    ids=["raised", "died", "refused", "in the driver"],
)
def test_an_error_is_said_in_one_line_without_its_traceback(error, line):
    assert in_one_line(error) == line

"""What stands in one cell of the table is one line."""

import math
from itertools import permutations

import pytest

from anytron.base.errors import AnytronError, ConfigError, EngineError, ProcessLost, WorkerError
from anytron.base.results import Result, in_one_line, of_error
from anytron.cli.checks import print_report
from anytron.proof.checks import Report
from anytron.proof.verification.comparisons import joined, measured, used

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

failed afterwards: ranks 1"""


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
            "The loss is not finite. update: it is nan, the norm 1 (log: trainer-0.log)",
        ),
        (
            with_cause(
                EngineError("A weight is unknown.", where="layers.0.gate_proj.weight", why="no such module"),
                WorkerError("failed", where="rollout-0.log", why=TRACEBACK),
            ),
            "A weight is unknown. layers.0.gate_proj.weight: no such module (log: rollout-0.log)",
        ),
        (ConfigError("There are no prompts.", where="data.source"), "There are no prompts. data.source"),
    ],
    ids=["raised", "died", "refused", "a weight", "in the driver"],
)
def test_an_error_is_said_in_one_line_without_its_traceback(error, line):
    assert in_one_line(error) == line


def errors():
    """Every class of error that a check can end in."""
    found = [AnytronError]
    for one in found:  # it grows
        found += one.__subclasses__()
    return found


@pytest.mark.parametrize("kind", errors(), ids=lambda kind: kind.__name__)
def test_no_field_of_an_error_is_dropped(kind):
    fields = {"what": "Something failed.", "where": "layers.0.weight", "why": "ValueError: no", "fix": "set it"}
    found = of_error("check", kind(fields["what"], where=fields["where"], why=fields["why"], fix=fields["fix"]))
    line = found.detail + found.fix
    dropped = {name for name, text in fields.items() if text not in line}
    assert dropped == ({"why"} if issubclass(kind, ProcessLost) else set())  # there it is the end of the log it names


def test_nan_takes_more_of_its_tolerance_than_any_number():
    assert used(1e-3, 1e-2) == pytest.approx(0.1)
    assert used(0.5, None) == 0.5
    assert used(None, None) == 0.0
    assert used(math.nan, 1e-2) == math.inf
    assert used(math.nan, None) == math.inf


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_of_two_models_the_worse_one_is_told_of_whichever_it_is(order):
    def told(*results):
        policy, critic = (results[index] for index in order)
        both = joined([policy, critic])
        assert both.detail == f"{policy.detail}; the critic: {critic.detail}"
        return both.status, both.difference

    far, near = measured("logits", 5.0, 1.0, "far"), measured("logits", 0.5, 1.0, "near")
    fine, nan = measured("logits", 0.9, 2.0, "fine"), measured("logits", math.nan, 1.0, "NaN")
    assert told(far, near) == ("failed", 5.0)
    assert told(near, fine) == ("passed", 0.5), "by the part of its tolerance"
    assert told(Result("logits", "failed", "an error"), near) == ("failed", None)
    for other in (far, near, Result("logits", "skipped", "no such model")):
        status, difference = told(nan, other)
        assert status == "failed"
        assert math.isnan(difference), other.detail


def test_one_model_s_result_is_its_own():
    alone = measured("logits", 0.5, 1.0, "near")
    assert joined([alone]) is alone


def test_the_table_has_the_columns_that_some_result_fills(capsys):
    found = [
        Result("hf-logits", "failed", "a [b]", "set it", difference=0.25, tolerance=0.5),
        Result("critic-values", "skipped", "the run has no critic"),
    ]
    assert print_report(Report(found), as_json=False) is False
    header, logits, fix, critic, *rest = (line.strip() for line in capsys.readouterr().out.splitlines())
    assert header.split() == ["status", "name", "difference", "tolerance", "detail"]
    assert logits.split(maxsplit=4) == ["failed", "hf-logits", "0.25", "0.5", "a [b]"]
    assert fix == "fix: set it"
    assert critic.split(maxsplit=4) == ["skipped", "critic-values", "-", "-", "the run has no critic"]
    assert rest == ["", "hf-logits failed", "a [b]", "fix: set it", "", "1 failed, 0 warning, 0 passed, 1 skipped"]


def test_results_with_cases_show_and_count_them(capsys):
    rule = Result("device.seeds", "failed", "It is wrong.", made=["a"], left_out={"b": "no"}, broken="c")
    print_report(Report([rule, Result("device.other", "skipped", "not here")]), as_json=False)
    title, header, seeds, _, *rest = (line.strip() for line in capsys.readouterr().out.splitlines())
    assert (title, header.split()) == ("device", ["status", "name", "cases", "skipped", "detail"])
    assert seeds.split(maxsplit=4) == ["failed", "seeds", "2", "1", "It is wrong."]
    assert rest[-1] == "1 failed, 0 warning, 0 passed, 1 skipped; 2 cases made, 2 skipped"

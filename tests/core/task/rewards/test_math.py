"""The reward ``math`` against a table of verdicts, and against math-verify alone."""

import pytest

from anytron.task.rewards import Sample
from anytron.task.rewards.math import Math
from anytron.task.rewards.math_answer import last_answer, written
from tests.core.task.rewards.math_table import TABLE, R

math_verify = pytest.importorskip("math_verify")


def score(answer, response):
    return Math()([Sample("p", "?", response, (1,), (2,), (-0.1,), finished=True, data={"answer": answer})])[0]


@pytest.mark.parametrize(
    ("answer", "response", "verdict", "about"), TABLE, ids=[f"{i} {row[3]}" for i, row in enumerate(TABLE)]
)
def test_it_judges_as_a_person_does(answer, response, verdict, about):
    assert score(answer, response) == verdict


@pytest.mark.parametrize("answer", list(dict.fromkeys(row[0] for row in TABLE)))
def test_each_right_answer_earns_its_reward_in_every_form_and_nothing_earns_it(answer):
    for form in ("{}", r"\boxed{{{}}}", "<answer>{}</answer>", "<think>hm</think>{}", r"The answer is \boxed{{{}}}."):
        assert score(answer, form.format(answer)) == 1.0, form
    for nothing in ("", "None", r"\boxed{}", "</think>", "I do not know."):
        assert score(answer, nothing) == 0.0


def alone(answer, response):
    """What math-verify says of the right answer in a box, and the whole response."""
    try:
        right = math_verify.parse(rf"\boxed{{{answer}}}", raise_on_error=True)
        return float(math_verify.verify(right, math_verify.parse(response, raise_on_error=True), raise_on_error=True))
    except Exception:  # noqa: BLE001 - sympy's
        return 0.0


def test_the_table_is_large_and_math_verify_alone_is_often_wrong():
    wrong = [row for row in TABLE if alone(row[0], row[1]) != row[2]]
    assert len(TABLE) >= 150
    assert sum(row[2] != R for row in TABLE) >= 30
    assert len(wrong) >= 20, len(wrong)


@pytest.mark.parametrize(
    "response", [r"\boxed{" * 2000, "$" * 5001, "(" * 5000 + "1,2", "1 and " * 3000, "</think>" * 999]
)
def test_strange_responses_are_read_at_once(response):
    found = last_answer(response)
    assert found is None or written(found).elements

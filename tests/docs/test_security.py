"""SECURITY.md promises nothing without a test: each row names one that exists; and its table of listeners is read."""

import ast
import os
import re
import socket

import pytest

from tests import listening
from tests.docs.twins import ELSEWHERE, TWINS
from tests.docs.twins.twin import notices
from tests.house import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| what Anytron promises", listening.HEADER))
]
WHERE = f"""
{listening.HEADER}
|---|---|---|---|---|---|---|
| here | driver | a test | loopback | free | nobody | `x` |

"""


def test_there_are_promises():
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:-1]))
def test_a_promise_has_a_test(row):
    *promise, named = row
    assert len(promise) in (1, 6)
    assert all(promise)
    path, name = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", named).groups()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.test.rpartition("::")[2])
def test_what_a_twin_takes_away_is_there(twin):
    assert f"`{twin.test}`" in {row[-1] for row in ROWS}
    assert (ROOT / twin.file).read_text(encoding="utf-8").count(twin.whole) == 1


def test_every_promise_has_a_twin():
    """Rows of listeners have one twin together, at the end of this file."""
    promises = {row[-1].strip("`") for row in ROWS if len(row) == 2}
    twins = {twin.test for twin in TWINS}
    assert promises - twins == set(ELSEWHERE)
    for test in ELSEWHERE.values():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.test.rpartition("::")[2])
def test_a_row_notices_that_its_border_is_gone(twin):
    assert notices(twin)


def test_every_row_of_listeners_is_compared_with_a_run():
    """By the test that it names; other tests of the same kind of run do it too."""
    checked = {}
    for path in {row[-1].strip("`").partition("::")[0] for row in listening.table()} | {"tests/demo/test_grpo_sort.py"}:
        text = (ROOT / path).read_text(encoding="utf-8")
        for run in re.findall(r'check\("([^"]+)", \w+\)', text):
            checked.setdefault(run, set()).add(path)
    assert checked.keys() == {row[0] for row in listening.table()}


def test_a_listener_without_a_row_and_a_row_without_a_listener_are_found():
    before = listening.listeners(os.getpid())

    def seen():
        return listening.described({os.getpid(): "driver"}, "192.0.2.77", before)

    with pytest.raises(AssertionError, match="has run other tests"):
        listening.described({os.getpid(): "driver"})
    with pytest.raises(AssertionError, match="in the table alone"):
        listening.check("here", seen(), WHERE)
    with socket.create_server(("127.0.0.1", 0)):
        listening.check("here", seen(), WHERE)
        with pytest.raises(AssertionError, match="no row of a run: elsewhere"):
            listening.check("elsewhere", seen(), WHERE)
        with socket.create_server(("", 0)), pytest.raises(AssertionError, match="not in the table"):
            listening.check("here", seen(), WHERE)
        with (
            socket.create_server(("::", 0), family=socket.AF_INET6),
            pytest.raises(AssertionError, match="not in the table"),
        ):
            listening.check("here", seen(), WHERE)

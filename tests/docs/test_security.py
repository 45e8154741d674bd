"""SECURITY.md promises nothing without a test: each row names one, and it exists."""

import ast
import re

import pytest

from tests.house import ROOT

ROWS = [
    line.strip("|").split("|")
    for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| what Anytron promises")
]


def test_there_are_promises():
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_a_promise_has_a_test(row):
    promise, named = (cell.strip() for cell in row)
    assert promise
    path, name = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", named).groups()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

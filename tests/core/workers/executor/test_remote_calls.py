"""Remote calls name methods of protocols: what mypy finds, what goes to the group, and that no call names a string."""

import ast
import subprocess
import sys

import pytest

from anytron.workers.engines.training_engine import CheckpointEngine, TrainingEngine
from anytron.workers.executor import protocol
from tests.house import ROOT

CALLS = ("call", "scatter", "submit", "submit_each")
SNIPPET = """
from anytron.algorithms.contract import LossFunction
from anytron.sequences.batch import RaggedBatch
from anytron.workers.executor import protocol
from anytron.workers.engines.training_engine import CheckpointEngine, TrainingEngine
from anytron.workers.executor.protocol import WorkerGroup


def calls(group: WorkerGroup, batches: list[RaggedBatch], loss: LossFunction) -> None:
    {}
"""


class Group:
    """Records calls."""

    def __init__(self):
        self.calls = []

    def call(self, method, *args, **kwargs):
        self.calls.append((method, args, kwargs))

    def scatter(self, method, shares):
        self.calls.append((method, shares))


def test_the_group_gets_the_methods_name_and_arguments():
    group = Group()
    protocol.call(group, CheckpointEngine.save_checkpoint, "here", asynchronous=True)
    protocol.scatter(group, TrainingEngine.score, [((0, 2), (1,)), ((1,), (2,))])
    assert group.calls == [
        ("save_checkpoint", ("here",), {"asynchronous": True}),
        ("score", [((0, 2), (1,)), ((1,), (2,))]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("protocol.scatter(group, TrainingEngine.update, [((0,), (batches, loss))])", None),
        ("protocol.call(group, TrainingEngine.descibe)", "attr-defined"),
        ('protocol.call(group, CheckpointEngine.save_checkpoint, "here", asynchronos=True)', "call-arg"),
        ('protocol.call(group, CheckpointEngine.save_checkpoint, "here", asynchronous="yes")', "arg-type"),
        ("protocol.scatter(group, TrainingEngine.update, [((0,), (loss, batches))])", "arg-type"),
        ("version: int = protocol.call(group, TrainingEngine.describe)[0]", "assignment"),
    ],
)
def test_mypy_finds_a_wrong_name_argument_or_result(call, error, tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(SNIPPET.format(call), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == (error is not None), done.stdout + done.stderr
    assert error is None or (done.stdout.count("error:") == 1 and f"[{error}]" in done.stdout)


def strings(code):
    """Lines of calls to a group that name a method by a string."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CALLS
        and ast.unparse(node.func.value).endswith("group")
        and node.args
        and (isinstance(node.args[0], ast.JoinedStr) or isinstance(getattr(node.args[0], "value", None), str))
    ]


def test_the_rule_finds_a_string():
    assert strings('a = 1\nself._group.call("describe")\ngroup.submit(f"load_{part}", origin)\n') == [2, 3]


@pytest.mark.parametrize("package", ["core", "backends"])
def test_no_call_names_its_method_by_a_string(package):
    found = {str(path): strings(path.read_text(encoding="utf-8")) for path in (ROOT / package).rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}

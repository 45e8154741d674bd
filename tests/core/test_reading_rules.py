"""What reads a file says what is wrong with it: rules that hold for all of the source."""

from __future__ import annotations

import ast

import pytest

from tests.house import ROOT

FOLDERS = (
    "core",
    "backends",
    "plugins/accelerator",
    "plugins/cpu",
    "plugins/cuda/anytron_cuda",
    "plugins/ascend/anytron_ascend",
)
FOLDERS += ("plugins/verl/anytron_verl",)

PARSERS = {"json.load", "json.loads", "yaml.safe_load", "yaml.load", "OmegaConf.create", "OmegaConf.load"}
METHODS = {"model_validate_json", "validate_json"}
PARSED_ELSEWHERE = {
    "core/anytron/config/json_files.py": "the reader",
    "core/anytron/config/load.py": "YAML, whose depth is bounded before it is built",
    "core/anytron_conformance/run.py": "values of the command line, which its user types",
    "core/anytron/workers/weights/messages.py": "from an end that has proved that it knows the run's secret",
    "core/anytron/workers/executor/channel.py": "the first message of the process that started it",
    "core/anytron/workers/executor/heartbeat.py": "notes in memory that processes share, and of torch's recorder",
    "core/anytron/task/isolation/plain.py": "what a confined process has read; depth is an error there, too",
    "core/anytron/task/isolation/process.py": "answers of processes, which are refused in words, depth included",
    "core/anytron/task/isolation/worker.py": "the first message of the process that started it",
    "core/anytron/record/report/settings.py": "what the line above has written",
    "core/anytron/task/rewards/judge.py": "answers of a server, a fault of which is the sample's, depth included",
    "core/anytron_conformance/tiny_models.py": "a model that a test has made",
    "core/anytron_conformance/training/whole_runs.py": "metrics of a run that a test has made",
    "plugins/accelerator/anytron_accelerator/detection.py": "the answer of a process that it has started",
    "backends/anytron_verifiers/environment.py": "arguments of the driver",
    "backends/anytron_verifiers/tasksets.py": "arguments of the driver",
    "backends/anytron_verifiers/source.py": "rows of an environment, a package that the user has installed",
    "backends/anytron_vllm/installation.py": "what our own program prints",
    "plugins/verl/anytron_verl/configuration.py": "a configuration that hydra has read",
    "plugins/verl/anytron_verl/examination.py": "what our own program prints",
    "plugins/verl/anytron_verl/verification.py": "what its own processes have written",
}


def parsers(text):
    """Calls in a source that make values of text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if name in PARSERS or node.func.attr in METHODS:
                yield name


NOT_OF_A_FILE = {
    "core/anytron/workers/weights/buckets.py": "shared memory, whose end has an error of its own",
    "core/anytron/workers/weights/memory.py": "a socket of another process, which has not made it yet",
    "core/anytron/workers/weights/network.py": "sockets that are open",
    "core/anytron/workers/weights/stream.py": "sockets that are open",
    "core/anytron/task/isolation/reader.py": "a fork and a channel; the child asks what happened to its files",
    "plugins/ascend/anytron_ascend/cann.py": "a library of the vendor's",
    "plugins/ascend/anytron_ascend/runtime.py": "an import",
    "plugins/cuda/anytron_cuda/modules.py": "an import",
}
ASKS = ("exhausted", "_unreadable", "read_object", "read_config")
"""What asks for the cause, in the handler or before it."""


def deaf(text):
    """Handlers that turn any OSError into another error, without asking whether it is one of the machine's."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Try):
            continue
        for handler in node.handlers:
            caught = {one.id for one in ast.walk(handler.type or handler) if isinstance(one, ast.Name)}
            raises = any(isinstance(one, ast.Raise) and one.exc is not None for one in ast.walk(handler))
            asked = ast.unparse(handler) + "".join(map(ast.unparse, node.body))
            if "OSError" in caught and raises and not any(name in asked for name in ASKS):
                yield handler.lineno


def sources():
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "tests" not in path.relative_to(ROOT).parts
    }


def test_files_become_values_in_one_place():
    found = sources()
    assert len(found) > 300
    assert {path for path, text in found.items() if any(parsers(text))} == set(PARSED_ELSEWHERE)


@pytest.mark.parametrize(
    "call", ["json.load(file)", "json.loads(path.read_text())", "Record.model_validate_json(text)"]
)
def test_another_place_would_be_found(call):
    assert list(parsers(f"def read(path):\n    return {call}\n"))


def test_no_error_of_the_machine_is_taken_for_one_of_a_file():
    assert {path for path, text in sources().items() if any(deaf(text))} == set(NOT_OF_A_FILE)


def test_a_handler_that_does_not_ask_would_be_found():
    handler = "try:\n    open(x)\nexcept (OSError, ValueError) as error:\n    raise {0}Damaged(x) from error\n"
    assert list(deaf(handler.format(""))) == [3]
    assert not list(deaf(handler.format("exhausted(error) or ")))

"""The whole session runs on the simulator: it is built if need be, and activated before anything imports torch.

Needs torch_npu (``tox -e ascend`` installs it); tests that need another state of affairs start processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.skips import Skips

for name, value in {
    "ANYTRON_ASCEND_SIMULATOR": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TASK_QUEUE_ENABLE": "0",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ[name] = value

# A deadline per example would time the machine; on CI the same examples are tried at every run.
settings.register_profile("anytron", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("anytron")

PROGRAMS = Path(__file__).parent / "programs"

ENVIRONMENT = "tox -e ascend makes an environment for these tests"

CHECKOUTS = {
    "mindspeed": ("ANYTRON_MINDSPEED", "names no checkout of MindSpeed, branch core_r0.16.0"),
    "mindspeed_llm": ("ANYTRON_MINDSPEED_LLM", "names no folder with MindSpeed-LLM and what it runs on"),
    "vllm_ascend": ("ANYTRON_VLLM_ASCEND", "names no folder with checkouts of vllm-ascend's branches"),
}
"""Markers of tests that need checkouts: the variable that names them, and why tests skip where it does not."""
MARKED = {"mindspeed": 26, "mindspeed_llm": 6, "vllm_ascend": 173}
SKIPPED = {"npu": 0, **{marker: 0 if os.environ.get(CHECKOUTS[marker][0]) else MARKED[marker] for marker in MARKED}}
"""How many tests of the whole suite skip on a machine without NPU, by the marker that says what they need."""

SLOW_RULES = (
    "model.empty-shares", "model.context-parallel", "model.pipeline-parallel", "model.expert-parallel",
    "training.sampled-steps", "training.resumed-run",
)  # fmt: skip
"""Rules of the kit that take 15 seconds or more: ``tox -e ascend -- -m slow`` checks them."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {f"test_conformance[{rule}]" for rule in SLOW_RULES}
    rules = {item.name: item for item in items if item.name.startswith("test_conformance[")}
    assert len(rules) < 2 or slow <= rules.keys(), "each is a rule of the kit"
    for name in slow & rules.keys():
        rules[name].add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    try:
        from anytron_ascend_simulator import SimulatorError, activate
        from anytron_ascend_simulator.build import build
    except ModuleNotFoundError as error:
        raise pytest.UsageError(f"{error} ({ENVIRONMENT})") from error
    config.pluginmanager.register(Skips(SKIPPED, counted=True, where="plugins/ascend/tests/conftest.py"), "skips")
    # torch_npu says so whenever it makes a tensor of its own accord.
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format")
    try:
        build()
        activate()
    except SimulatorError as error:
        raise pytest.UsageError(f"{error} ({ENVIRONMENT})") from error


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (variable, reason) in CHECKOUTS.items():
        if item.get_closest_marker(marker) and not os.environ.get(variable):
            pytest.skip(f"{variable} {reason}")


@pytest.fixture(scope="session")
def run_program():
    """Run one of ``programs/`` (or ``-c`` text) in ``ranks`` processes; give their outputs, or check how they fail."""

    def run(program: str, *arguments: str, ranks: int = 1, environment=None, fails=False, timeout=240) -> list[str]:
        port = str(29000 + os.getpid() % 2000)
        command = ["-c", program] if "\n" in program else [str(PROGRAMS / program)]
        processes = [
            subprocess.Popen(
                [sys.executable, *command, *arguments],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    **(environment or {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        codes = [process.returncode for process in processes]
        assert any(codes) == fails, "\n".join(outputs)
        return outputs

    return run

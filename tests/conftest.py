"""Settings of all tests: one processor thread, a check of what was skipped, and which tests share a process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from anytron.device.patches.plan import in_range, installed_version
from tests.skips import Skips
from tests.slow import mark_others_slow, without_families
from tests.warm_python import StartedCold, WarmPopen, end_server

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

# Set before anything imports torch: tests run several processes on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A deadline per example would time the machine. On CI the same examples are tried at every run, so fewer do.
settings.register_profile(
    "anytron", deadline=None, max_examples=30 if "CI" in os.environ else 60, derandomize="CI" in os.environ
)
settings.load_profile("anytron")

MENDED = in_range(installed_version("megatron-core") or "0", ">=0.18")
"""Whether the fault of latent attention that two tests show is mended (patch ``megatron.mla-values``)."""
SKIPPED = {
    "gpu": 58,
    "triton": 5,
    "npu": 0,
    "compiler": 0,
    "verifiers": 17,
    "agents": 20,
    "smollm2": 2,
    "sinks": 4,
    "vllm": 49,
    "machines": 23,
    "megatron_lm": 5,
    "mcore": 2 * MENDED,
    "browser": 15,
}
"""How many tests of the whole suite skip on a machine without accelerator, by the marker that says what they need."""


WARM = (
    "tests/conformance/",
    "tests/core/proof/",
    "tests/core/cli/test_chat_command.py",
    "tests/core/cli/test_doctor_command.py",
    "tests/core/cli/test_patches_command.py",
    "tests/core/cli/test_plan_command.py",
    "tests/backends/megatron/",
    "tests/benchmarks/",
    "tests/core/workers/engines/",
    "tests/core/workers/executor/test_failures.py",
    "tests/core/workers/executor/test_pending.py",
    "tests/core/workers/executor/test_stall.py",
    "tests/core/workers/weights/",
    "tests/core/kernels/test_log_prob.py",
    "tests/core/run/preflight/",
    "tests/core/run/rollout/test_processes.py",
    "tests/core/sequences/",
    "tests/core/run/trainer/",
    "tests/demo/",
    "tests/plugins/cuda/attention/test_training.py",
    "tests/verification/",
)
"""Whose tests start Python from a process that has imported what is slow to import."""
COLD = (
    "tests/backends/megatron/test_plugin.py",
    "tests/benchmarks/on_a_gpu/test_run.py",
    "tests/demo/test_grpo_sort.py",
)
"""What is imported when; which processes end; and everything as a user starts it."""


@pytest.fixture(autouse=True, scope="module")
def warm_python(request):
    """Start programs as :mod:`tests.warm_python` says, in the folders of which that is said above.

    Not where there is a GPU: what is imported there may ask CUDA, and starts threads of torch's compiler. A fork has
    neither.
    """
    if request.node.nodeid.startswith(WARM) and request.node.nodeid not in COLD and not has_gpu():
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(subprocess, "Popen", WarmPopen)
            yield
    else:
        yield


@pytest.fixture
def started_cold(warm_python, monkeypatch):
    """Start programs from nothing: a fork is as large as its server, whose modules count in its memory."""
    monkeypatch.setattr(subprocess, "Popen", StartedCold)


@pytest.fixture
def started_warm(monkeypatch):
    """Start the programs of one test from the warm process, where those of its file start from nothing."""
    if not has_gpu():
        monkeypatch.setattr(subprocess, "Popen", WarmPopen)


def has_gpu() -> bool:
    import torch

    return torch.cuda.device_count() > 0


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases to ``tox -e slow`` and ``tox -e families``, and let libraries warn on a GPU: in untested versions."""
    mark_others_slow(items)
    if "families" not in config.option.markexpr:
        items[:] = without_families(items)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_collection_finish():
    """Modules and tests stay: without this, each full collection looks at them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    end_server()


def pytest_configure(config: pytest.Config) -> None:
    # nohup ignores SIGHUP and a shell's background SIGINT: tests of signals, and what they start, would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Slow tests that skip are not in the numbers above. A part of the suite never skips more than the whole.
    counted = config.option.markexpr == "not slow"
    config.pluginmanager.register(Skips(SKIPPED, counted=counted, where="tests/conftest.py"), "skips")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    """Distribute tests over the processes of pytest-xdist as :mod:`tests.distribution` says."""
    from tests.distribution import FilesAndRanks

    return FilesAndRanks(config, log)

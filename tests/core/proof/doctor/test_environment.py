"""Doctor measures in the environment that a training rank of the same run has."""

import pytest

from anytron.proof.doctor import devices, live, session
from anytron.proof.doctor.subject import look
from tests.core.proof.doctor.conftest import by_name
from tests.house import ROOT

MODE = """
import os
from anytron import hookimpl
from anytron.kernels.log_prob import make_log_prob

class Plugin:
    @hookimpl
    def runtime_env(self, process, config):
        return {"CHIP_MODE": f"deterministic={config.engine.deterministic}, ranks={process.world_size}"}

    @hookimpl
    def log_prob_kernel(self, spec):
        right = make_log_prob(spec)
        def kernel(*arguments):
            return right(*arguments)
        kernel.description = os.environ.get("CHIP_MODE", "not set")
        return kernel
"""


@pytest.mark.parametrize(
    ("run", "mode"),
    [
        ((ROOT / "examples/grpo_sort.yaml", ["engine.deterministic=true"]), "deterministic=True, ranks=1"),
        ((None, []), "deterministic=False, ranks=1"),
    ],
    ids=["a run", "no run"],
)
def test_doctor_has_the_environment_that_it_shows(site, monkeypatch, run, mode):
    site.extension("chip", MODE)
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(*run)
    shown = by_name(session.examine_environment(subject))["environment.CHIP_MODE"].detail
    assert shown == f"{mode} (a plugin sets it for training ranks)"
    with live.Live(subject) as process:
        measured = by_name(devices.examine_kernels(subject, process))["kernels.log_prob_kernel"].detail
    assert mode in measured

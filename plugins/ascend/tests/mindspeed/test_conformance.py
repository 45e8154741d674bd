"""The conformance kit with real MindSpeed on simulated NPUs, rule by rule: what it computes and how it trains."""

from __future__ import annotations

import pytest

from anytron_conformance import conformance

# Of the whole rule; the kit ends each case after a limit of its own.
pytestmark = [pytest.mark.mindspeed, pytest.mark.timeout(2400)]

# The other levels are about the device and about kernels of portable modules, whatever the adaptor.
test_conformance = conformance("ascend", level=("model", "training"), options={"adaptor": "mindspeed"})


@pytest.fixture(autouse=True)
def mindspeed_can_be_imported(with_mindspeed, monkeypatch):
    """In the processes that the kit starts."""
    monkeypatch.setenv("PYTHONPATH", with_mindspeed["PYTHONPATH"])


LEFT_OUT = {"model.context-parallel": 2, "model.multi-token-prediction": 1}
"""Cases that the adaptor refuses: multi-latent attention with context parallelism."""


@pytest.fixture(autouse=True)
def no_other_case_is_skipped(request):
    """The simulator has devices enough."""
    yield
    rule = request.node.callspec.id
    assert dict(request.node.user_properties)["cases_skipped"] == LEFT_OUT.get(rule, 0)

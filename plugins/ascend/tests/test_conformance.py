"""The conformance kit on simulated NPUs, every level, with adaptor ``none``."""

from __future__ import annotations

import pytest

from anytron_conformance import conformance

test_conformance = conformance("ascend")

LEFT_OUT = {"sequences.mask-is-read": 5}
"""Cases that no platform can be asked: nothing tells a ring of padded rows which tokens are padding."""


@pytest.fixture(autouse=True)
def no_other_case_is_skipped(request):
    """The platform declares no limit, and the simulator has devices enough: nothing of theirs is left out."""
    yield
    rule = request.node.callspec.id
    assert dict(request.node.user_properties)["cases_skipped"] == LEFT_OUT.get(rule, 0)

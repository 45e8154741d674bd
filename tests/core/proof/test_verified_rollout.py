"""What ``anytron verify`` changes in a run's rollout before it compares engines."""

from __future__ import annotations

import pytest

from anytron.config.schema import default_run
from anytron.proof.verification import checks


class Prepared(Exception):  # noqa: N818 - not an error
    """Ends the verification once prompts are prepared."""


def test_weights_are_not_rounded_because_that_would_hide_differences(monkeypatch):
    seen = []

    def prepare(config):
        seen.append(config)
        raise Prepared

    monkeypatch.setattr(checks, "prepare", prepare)
    watcher = type("Watcher", (), {"begins": lambda self, what: None})()
    for sections in ({"quantization": "fp8", "top_k": 3}, {"top_k": 3}):
        with pytest.raises(Prepared):
            checks.verify(default_run({"rollout": sections}), None, None, watcher)
    assert seen[0].rollout == seen[1].rollout
    assert seen[0].rollout.top_k == 3
    corrections = [one.algorithm.importance_correction for one in seen]
    assert corrections == ["truncated", "auto"], "the loss that is compared is the run's"

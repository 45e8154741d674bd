"""``algorithm.importance_correction: auto`` corrects where rollout and training have different policies."""

import pytest
from pydantic import ValidationError

from anytron.config.schema import default_run


def test_the_correction_follows_what_makes_rollouts_differ():
    def correction(rollout, **algorithm):
        return default_run({"rollout": rollout, "algorithm": algorithm}).corrected_algorithm.importance_correction

    assert correction({}) == "auto"  # nothing to correct
    assert correction({"max_staleness": 1}) == correction({"quantization": "fp8"}) == "truncated"
    assert correction({"quantization": "fp8"}, importance_correction="measured") == "measured"
    with pytest.raises(ValidationError, match="quantization"):
        default_run({"rollout": {"quantization": "int4"}})

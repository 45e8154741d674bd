"""A configuration that the schema refuses is accepted when it is changed as the error says."""

import pytest
from pydantic import ValidationError

from anytron.config.schema import RunConfig

RUN = {
    "model": {"path": "model"},
    "data": {"source": "jsonl", "options": {"path": "p.jsonl"}},
    "rewards": [{"function": "exact_match"}],
}
GAE = {"advantage": "gae"}


def refusal(**sections):
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({**RUN, **sections})
    return str(caught.value)


def accepted(**sections):
    return RunConfig.model_validate({**RUN, **sections}) is not None


def test_dynamic_sampling_with_a_critic():
    said = refusal(algorithm={**GAE, "dynamic_sampling": True}, critic={})
    assert "remove algorithm.dynamic_sampling, or set algorithm.advantage=grpo and remove the section critic" in said
    assert accepted(algorithm=GAE, critic={})
    assert accepted(algorithm={"advantage": "grpo", "dynamic_sampling": True})


def test_dynamic_sampling_without_a_critic():
    said = refusal(algorithm={"advantage": "reinforce_plus_plus", "dynamic_sampling": True})
    assert "algorithm.advantage=grpo" in said
    assert "section critic" not in said


@pytest.mark.parametrize(("advantage", "removes"), [("grpo", True), ("none", False)])
def test_a_teacher_without_effect(advantage, removes):
    said = refusal(algorithm={"advantage": advantage}, teacher={"path": "t"})
    assert "set this key above 0" in said
    assert ("remove the section teacher" in said) is removes
    assert accepted(algorithm={"advantage": advantage, "distillation_coefficient": 1.0}, teacher={"path": "t"})
    if removes:
        assert accepted(algorithm={"advantage": advantage})
    else:
        refusal(algorithm={"advantage": advantage})


def test_no_advantage_and_no_teacher():
    said = refusal(algorithm={"advantage": "none"})
    assert "add a section teacher and set algorithm.distillation_coefficient above 0" in said
    assert accepted(algorithm={"advantage": "none", "distillation_coefficient": 1.0}, teacher={"path": "t"})
    assert accepted(algorithm={"advantage": "grpo"})

"""Reward functions, good and bad."""

from __future__ import annotations

import math

import pytest
import torch

from anytron.config.schema import RewardSection
from anytron.errors import ConfigError, DataError
from anytron.rewards import Sample
from anytron.rewards.registered import contains, exact_match
from anytron.rewards.scoring import Reward, RewardSum


def sample(response="13", prompt_id="p0", **data) -> Sample:
    return Sample(prompt_id, "31>", response, (3, 1, 10), (1, 3), (-0.1, -0.1), finished=True, data=data)


SAMPLES = [sample("13", "p0", answer="13"), sample(" 13 ", "p1", answer=13), sample("so 13", "p2", answer="13")]


def test_exact_match_ignores_white_space_and_types():
    assert exact_match(SAMPLES) == [1, 1, 0]


def test_contains():
    assert contains(SAMPLES) == [1, 1, 1]
    assert contains([sample("1 3", answer="13")]) == [0]


def test_a_prompt_without_the_answer_is_named():
    with pytest.raises(DataError, match=r"(?s)no entry 'answer'.*prompt p9.*'solution'"):
        exact_match([sample("1", "p9", solution="1")])


def test_rewards_are_added_with_their_weights_and_options(tmp_path):
    (tmp_path / "r.py").write_text(
        "def size(samples, per):\n    return [len(s.response_text) / per for s in samples]\n"
    )
    sections = [
        RewardSection(function="exact_match", weight=2.0),
        RewardSection(function=f"{tmp_path}/r.py:size", weight=-1.0, options={"per": 10}),
    ]
    scores = RewardSum.from_config(sections)(SAMPLES)
    torch.testing.assert_close(scores.total, torch.tensor([1.8, 1.6, -0.5]))
    assert scores.parts["exact_match"].tolist() == [1, 1, 0]
    torch.testing.assert_close(scores.parts["size"], torch.tensor([0.2, 0.4, 0.5]))


@pytest.mark.parametrize(("options", "says"), [({"per": 1, "limit": 3}, "'limit'"), ({}, "'per'")])
def test_options_that_the_function_does_not_take_are_found_before_a_run(tmp_path, options, says):
    (tmp_path / "r.py").write_text("def size(samples, per):\n    return [0.0] * len(samples)\n")
    with pytest.raises(ConfigError, match=rf"(?s)rewards\[0\]\.options.*{says}.*it takes \(samples, per\)"):
        RewardSum.from_config([RewardSection(function=f"{tmp_path}/r.py:size", options=options)])


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"(?s)Two rewards are called exact_match.*rewards\[1\]"):
        RewardSum.from_config([RewardSection(function="exact_match")] * 2)


@pytest.mark.parametrize(
    "answer", [[1, 0, 0.5], (True, False, 0.5), torch.tensor([1, 0, 0.5]), torch.tensor([1, 0, 0.5]).numpy()]
)
def test_any_sequence_of_numbers_will_do(answer):
    values = Reward("r", lambda samples: answer, 1.0)(SAMPLES)
    assert values.dtype == torch.float32
    assert values.tolist() == [1, 0, 0.5]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0.0, math.nan, 0.0], "(?s)A reward is nan.*reward judge, prompt p1, response ' 13 '.*finite"),
        ([0.0, 0.0, -math.inf], "(?s)A reward is -inf.*prompt p2"),
        ([0.0, 1e39, 0.0], "(?s)A reward is inf.*prompt p1.*finite in float32"),
        ([1.0, 2.0], "(?s)wrong number of rewards.*reward judge.*2 rewards for 3 samples"),
        ([1.0, None, 2.0], "(?s)not a number.*prompt p1.*None"),
        (0.5, "(?s)returned no list.*float"),
        (None, "(?s)returned no list.*NoneType"),
    ],
)
def test_an_unusable_answer_names_function_and_sample(answer, message):
    with pytest.raises(DataError, match=message):
        Reward("judge", lambda samples: answer, 1.0)(SAMPLES)


def test_a_function_that_raises_is_shown_with_the_sample_it_looked_at():
    def score(one):
        return 1 / (one.prompt_id != "p2")

    with pytest.raises(DataError, match=r"(?s)reward judge, prompt p2.*ZeroDivisionError.*samples\.jsonl") as caught:
        Reward("judge", lambda samples: [score(one) for one in samples], 1.0)(SAMPLES)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_generator_will_do_and_may_raise_late():
    def judge(samples):
        for one in samples:
            if one.prompt_id == "p2":
                raise LookupError("no opinion")
            yield 1.0

    assert Reward("judge", judge, 1.0)(SAMPLES[:2]).tolist() == [1, 1]
    with pytest.raises(DataError, match=r"(?s)raised.*reward judge, prompt p2.*LookupError: no opinion"):
        Reward("judge", judge, 1.0)(SAMPLES)

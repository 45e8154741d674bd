"""Reward functions: what they may return, and how those of a run are found and added."""

from __future__ import annotations

import math

import pytest
import torch

from anytron.algorithms.advantages import grpo
from anytron.base.errors import ConfigError, DataError
from anytron.config.scoring import RewardSection
from anytron.task.rewards import Sample
from anytron.task.rewards.answer import Answer, answer
from anytron.task.rewards.matching import Contains, ExactMatch
from anytron.task.rewards.scoring import RewardSum
from anytron.task.rewards.worker import WatchedSamples
from tests.core.task.data.tables import table_of


def sample(response="13", prompt_id="p0", **data) -> Sample:
    return Sample(prompt_id, "31>", response, (3, 1, 10), (1, 3), (-0.1, -0.1), finished=True, data=data)


SAMPLES = [sample("13", "p0", answer="13"), sample(" 13 ", "p1", answer=13), sample("so 13", "p2", answer="13")]


def test_exact_match_ignores_white_space_and_types():
    assert ExactMatch()(SAMPLES) == [1, 1, 0]


def test_contains():
    assert Contains()(SAMPLES) == [1, 1, 1]
    assert Contains()([sample("1 3", answer="13")]) == [0]


def test_a_prompt_without_the_answer_is_named():
    rewards = RewardSum.from_config([RewardSection(function="exact_match")])
    rewards.check([table_of({"answer": 1}, name="p8")])
    with pytest.raises(DataError, match=r"(?s)no entry 'answer'.*prompt p9.*rewards\[0\] \(exact_match\).*'solution'"):
        rewards.check([table_of({"solution": "1"}, name="p9")])


def test_rewards_are_added_with_their_weights_and_options(tmp_path):
    (tmp_path / "r.py").write_text(
        "def size(samples, per):\n    return [len(s.response_text) / per for s in samples]\n"
    )
    sections = [
        RewardSection(function="exact_match", weight=2.0),
        RewardSection(function=f"{tmp_path}/r.py:size", weight=-1.0, options={"per": 10}),
    ]
    with RewardSum.from_config(sections).start(tmp_path / "logs", start_timeout_s=60) as score:
        scores = score(SAMPLES)
    torch.testing.assert_close(scores.total, torch.tensor([1.8, 1.6, -0.5]))
    assert scores.parts["exact_match"].tolist() == [1, 1, 0]
    torch.testing.assert_close(scores.parts["size"], torch.tensor([0.2, 0.4, 0.5]))
    assert scores.failures == {"exact_match": {}, "size": {}}


def test_the_largest_rewards_have_finite_statistics_and_weights_cannot_make_them_larger(tmp_path):
    (tmp_path / "r.py").write_text(
        "def far(samples):\n    return [1e15 if s.response_text == '13' else -1e15 for s in samples]\n"
    )
    section = RewardSection(function=f"{tmp_path}/r.py:far")
    with RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=60) as score:
        total = score(SAMPLES).total
    rows = total[None].double()
    torch.testing.assert_close(grpo(total[None], True), grpo(rows, True).float())
    torch.testing.assert_close(total.var(), rows.var().float())
    section = RewardSection(function=f"{tmp_path}/r.py:far", weight=1e30)
    with (
        RewardSum.from_config([section]).start(tmp_path / "logs", start_timeout_s=60) as score,
        pytest.raises(DataError, match=r"(?s)weighted reward is too large.*far, prompt p0.*1e\+30 \* 1e\+15 is not"),
    ):
        score(SAMPLES)


@pytest.mark.parametrize(("options", "says"), [({"per": 1, "limit": 3}, "'limit'"), ({}, "'per'")])
def test_options_that_the_function_does_not_take_are_found_before_a_run(tmp_path, options, says):
    (tmp_path / "r.py").write_text("def size(samples, per):\n    return [0.0] * len(samples)\n")
    with pytest.raises(
        ConfigError, match=rf"(?s)rewards\[0\]\.function, with its options.*{says}.*it takes \(samples, per\)"
    ):
        RewardSum.from_config([RewardSection(function=f"{tmp_path}/r.py:size", options=options)])


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"timeout": 3}, r"rewards\[1\]\.options\.timeout"),
        ({"memory_gib": "much"}, r"rewards\[1\]\.options\.memory_gib"),
    ],
)
def test_options_of_our_rewards_are_looked_at_before_a_run(options, where):
    sections = [RewardSection(function="exact_match"), RewardSection(function="code", options=options)]
    with pytest.raises(ConfigError, match=where):
        RewardSum.from_config(sections)


class Judge:
    """A reward model that has its scores already."""

    def __init__(self, *scores):
        self.scores, self.asked = list(scores), []

    def begin(self, samples):
        self.asked.append(samples)
        return lambda: self.scores[: len(samples)]


def judged(tmp_path, judge, *, more=False, samples=SAMPLES, **section):
    sections = [RewardSection(function="exact_match"), RewardSection(function="reward_model", weight=0.5, **section)]
    with RewardSum.from_config(sections).start(tmp_path / "logs", start_timeout_s=60) as score:
        return score.beside(judge)(samples, more=more)


def test_a_model_scores_beside_functions_at_the_same_time(tmp_path):
    found = judged(tmp_path, judge := Judge(2.0, -1.0, 4.0), name="liked")
    torch.testing.assert_close(found.total, torch.tensor([2.0, 0.5, 2.0]))
    assert found.parts["liked"].tolist() == [2.0, -1.0, 4.0]
    assert [len(samples) for samples in judge.asked] == [3]


def test_a_score_that_is_not_finite_loses_its_sample_as_a_function_s_does(tmp_path):
    scores = Judge(2.0, math.nan, math.inf)
    found = judged(tmp_path, scores)
    assert found.total.isnan().tolist() == [False, True, True]
    assert [found.failures["reward_model"][index].what for index in (1, 2)] == [
        "The reward model returned the score nan.",
        "The reward model returned the score inf.",
    ]
    assert judged(tmp_path, scores, on_error="zero").parts["reward_model"].tolist() == [2.0, 0.0, 0.0]
    with pytest.raises(DataError, match=r"(?s)the score nan.*reward reward_model, prompt p1"):
        judged(tmp_path, scores, on_error="stop")
    with pytest.raises(DataError, match="for every sample of the step"):
        judged(tmp_path, Judge(*[math.nan] * 3), on_error="zero")
    assert judged(tmp_path, Judge(*[math.nan] * 3), more=True).total.isnan().all()


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"(?s)Two rewards are called exact_match.*rewards\[1\]"):
        RewardSum.from_config([RewardSection(function="exact_match")] * 2)


@pytest.mark.parametrize(
    "returned", [[1, 0, 0.5], (True, False, 0.5), torch.tensor([1, 0, 0.5]), torch.tensor([1, 0, 0.5]).numpy()]
)
def test_any_sequence_of_numbers_will_do(returned):
    assert answer(lambda samples: returned, SAMPLES) == Answer([1.0, 0.0, 0.5], [])


@pytest.mark.parametrize(
    ("returned", "values", "what", "why", "sample"),
    [
        ([0.0, math.nan, 0.0], [0.0, None, 0.0], "A reward is nan.", "rewards must be finite", 1),
        ([0.0, 0.0, -math.inf], [0.0, 0.0, None], "A reward is -inf.", "rewards must be finite", 2),
        ([0.0, 3e38, 0.0], [0.0, None, 0.0], "A reward is 3e+38.", "between -1e+15 and 1e+15", 1),
        ([-1e39, 1e15, 0.0], [None, 1e15, 0.0], "A reward is -1e+39.", "between -1e+15 and 1e+15", 0),
        ([0.0, 0.0, -(10**400)], [0.0, 0.0, None], "A reward is -inf.", "rewards must be finite", 2),
        ([1.0, None, 2.0], [1.0, None, 2.0], "A reward is not a number.", "it returned None for a sample", 1),
        ([1.0, 2.0], [], "A reward function returned the wrong number of rewards.", "2 rewards for 3 samples", None),
        (0.5, [], "A reward function returned no list.", "it returned float", None),
        (None, [], "A reward function returned no list.", "it returned NoneType", None),
    ],
)
def test_what_cannot_be_used_is_a_failure_of_its_sample_or_of_the_call(returned, values, what, why, sample):
    found = answer(lambda samples: returned, SAMPLES)
    (failure,) = found.failures
    assert found.values == values
    assert (failure.what, failure.sample, failure.ends) == (what, sample, False)
    assert why in failure.why
    assert Answer.from_json(found.as_json(), len(SAMPLES)) == found


def test_a_function_that_raises_is_shown_with_the_sample_it_looked_at():
    def score(one):
        return 1 / (one.prompt_id != "p2")

    (failure,) = answer(lambda samples: [score(one) for one in samples], SAMPLES).failures
    assert (failure.what, failure.sample) == ("A reward function raised an exception.", 2)
    assert "ZeroDivisionError" in failure.why


def test_a_generator_will_do_and_may_raise_late():
    def judge(samples):
        for one in samples:
            if one.prompt_id == "p2":
                raise LookupError("no opinion")
            yield 1.0

    assert answer(judge, SAMPLES[:2]).values == [1, 1]
    (failure,) = answer(judge, SAMPLES).failures
    assert failure.sample == 2
    assert "LookupError: no opinion" in failure.why


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda samples: [len(samples.turns)],
            "is a list of Sample: for sample in samples: sample.turns",
        ),
        (lambda samples: [len(one) for one in samples.completions], "no 'completions'; a Sample has prompt_id, "),
    ],
)
def test_a_function_that_takes_the_list_for_something_else_is_told_what_it_is(function, said):
    with WatchedSamples([], lambda position: None) as samples:
        failure = answer(function, samples).failures[0]
    assert "WatchedSamples" not in failure.why
    assert said in failure.why
    assert "test_scoring.py" in failure.why  # the user's file

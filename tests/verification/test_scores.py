"""The checks of a function that scores tokens: transformers' own model passes, and each way to be wrong fails one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from anytron.proof.verification.hugging_face import load_model
from anytron.proof.verification.scores import (
    LENGTHS,
    check_scores,
    random_sequences,
    transformers_logits,
    verify_scores,
)
from anytron.task.data.pretrained import read_hf_config
from anytron_conformance.tiny_models import write_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "verify-before-you-train.md"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory, None, torch.float32)


@pytest.fixture(scope="module")
def given(directory):
    batch = random_sequences(read_hf_config(directory).vocab_size)
    return batch, transformers_logits(directory, batch)


def scoring(model, *, leaks=False):
    """Score with a model of transformers, each sequence alone; or in one row, where each sees those before it."""

    def score(lengths, tokens):
        pieces = []
        for row in [tokens] if leaks else tokens.split(lengths.tolist()):
            logits = model(row[None], use_cache=False).logits[0, :-1]
            pieces += [torch.zeros(1), logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]]
        return torch.cat(pieces)

    return score


def outcomes(results):
    return {result.name: result.status for result in results}


def test_a_right_function_passes_every_check(model, given):
    score = scoring(model)

    def gradients(lengths, tokens):
        model.zero_grad()
        score(lengths, tokens).mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    results = check_scores(score, *given, dtype="float32", padded=score, single=score, gradients=gradients)
    assert set(outcomes(results).values()) == {"passed"}, results
    assert results[0].detail.startswith(f"log-probs of {sum(LENGTHS) - len(LENGTHS)} tokens: at temperature 1 ")


def test_what_there_is_no_function_for_is_skipped(model, given):
    found = outcomes(check_scores(scoring(model), *given, dtype="float32"))
    assert [check for check, status in found.items() if status == "skipped"] == [
        "packed-equals-padded", "parallel-equals-single", "finite-gradients",
    ]  # fmt: skip


def test_the_fault_of_a_bridge_that_loses_rope_theta_is_found(directory, given, tmp_path):
    """As Megatron-Bridge 0.3.1 under transformers 5: theta 1e6 is read as 1e4, and nothing else is wrong."""

    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 0.01
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = scoring(load_model(tmp_path, None, torch.float32))
    found = check_scores(other, *given, dtype="float32", padded=other, single=other)
    assert outcomes(found) == {
        "hf-log-probs": "failed",
        "together-equals-alone": "passed",
        "packed-equals-padded": "passed",
        "parallel-equals-single": "passed",
        "finite-gradients": "skipped",
    }
    assert found[0].difference > 10 * found[0].tolerance


def test_sequences_that_see_each_other_are_found(model, given):
    found = outcomes(check_scores(scoring(model, leaks=True), *given, dtype="float32", padded=scoring(model)))
    assert found["together-equals-alone"] == found["packed-equals-padded"] == found["hf-log-probs"] == "failed"


def test_another_layout_that_is_wrong_is_found(model, given):
    def wrong(lengths, tokens):
        values = score(lengths, tokens)
        values[len(values) // 2] += 1e-2
        return values

    score = scoring(model)
    found = outcomes(check_scores(score, *given, dtype="float32", padded=wrong, single=wrong))
    assert (found["packed-equals-padded"], found["parallel-equals-single"]) == ("failed", "failed")
    assert found["hf-log-probs"] == found["together-equals-alone"] == "passed"


@pytest.mark.parametrize(
    ("value", "words"),
    [(float("nan"), "1 of 2 gradients are not finite; the first is b"), (0.0, "all of 2 gradients are 0")],
)
def test_gradients_that_are_none_are_found(model, given, value, words):
    wrong = {"a": torch.zeros(2), "b": torch.full((2,), value)}
    result = check_scores(scoring(model), *given, dtype="float32", gradients=lambda lengths, tokens: wrong)[-1]
    assert result.status == "failed"
    assert words in result.detail


def test_a_function_that_gives_something_else_is_told_so(given):
    with pytest.raises(ValueError, match=r"shape \(93,\), a log-prob for each token; it is \(6,\)"):
        check_scores(lambda lengths, tokens: torch.zeros(len(lengths)), *given, dtype="float32")


def test_the_example_of_the_page_passes(directory):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = {}
    exec(program, names)
    with torch.no_grad():
        found = outcomes(names["check"](directory))
    assert found["hf-log-probs"] == found["together-equals-alone"] == "passed"


def test_the_model_s_vocabulary_is_what_is_drawn_from(model, directory):
    assert outcomes(verify_scores(scoring(model), directory))["hf-log-probs"] == "passed"

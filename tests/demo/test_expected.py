"""Headers of examples say what to expect, in one form, of the steps that the example takes."""

import pytest

from anytron.config.load import read_stages
from tests.demo import expected as headers
from tests.demo.expected import EXAMPLES, Figure, assert_rewarded, expected

NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))]
HELD = ("cispo", "dapo", "distillation", "dr_grpo", "grpo", "gspo", "rloo", "sft_then_grpo")


def test_headers_that_tests_hold_say_something():
    assert {name for name in NAMES if expected(name)} == {
        *(f"{name}_sort" for name in HELD),
        "reasoning_gym",
        "grpo_smollm2",
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_last_figure_is_of_the_last_step(name):
    figures = expected(name)
    stages = [run.trainer.total_steps for run, _ in read_stages(EXAMPLES / f"{name}.yaml").values()]
    rewards = [figure.step for figure in figures if figure.what == "reward"]
    losses = [figure.step for figure in figures if figure.what == "held-out loss"]
    assert rewards[-1:] in ([], stages[-1:])
    accuracies = [figure.step for figure in figures if figure.what == "held-out accuracy"]
    assert losses in ([], stages[:1])
    assert accuracies in ([], stages[-1:])


def header(monkeypatch, tmp_path, *lines):
    monkeypatch.setattr(headers, "EXAMPLES", tmp_path)
    (tmp_path / "mine.yaml").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    "line",
    [
        "# Expected: reward 0.5 after 3 steps.",
        "# Expected: reward 0.50 after 3 steps, about a while on 2 idle cores.",
        "# expected: 0.50 after 3 steps.",
        "# Expected: reward 0.50 after 3 steps. And more.",
    ],
)
def test_a_line_of_another_form_is_noticed(line, monkeypatch, tmp_path):
    header(monkeypatch, tmp_path, line)
    with pytest.raises(AssertionError, match=r"0\.5"):
        expected("mine")


def test_rewards_are_means_of_the_ten_steps_that_end_there(monkeypatch, tmp_path):
    figures = "held-out loss 2.00 after 9 steps, reward 0.55 after 10 steps, reward 0.95 after 20 steps"
    header(monkeypatch, tmp_path, f"# Expected: {figures}, about 5 s on 2 idle cores.")
    assert expected("mine") == [Figure("held-out loss", 2.0, 9), Figure("reward", 0.55, 10), Figure("reward", 0.95, 20)]

    def run(first, second, steps=20):
        return [{"step": step, "reward/mean": first if step <= 10 else second} for step in range(1, steps + 1)]

    assert_rewarded("mine", run(0.521, 0.921))
    for bad in (run(0.519, 0.921), run(0.521, 0.919), run(0.9, 1.0, steps=19)):
        with pytest.raises(AssertionError):
            assert_rewarded("mine", bad)
    assert_rewarded("mine", run(0.519, 0.919), slack=0.05)

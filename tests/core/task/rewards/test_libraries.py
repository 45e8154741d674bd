"""Rewards that run what a model wrote, or hand it to libraries: in their processes, as in a run."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time

import pytest

from anytron.base.errors import ConfigError, DataError
from anytron.config.schema import DataSection, RunConfig
from anytron.config.scoring import RewardSection
from anytron.run.preflight.settings import reward_diagnostics
from anytron.task.data.sources import load_prompts
from anytron.task.rewards import Sample
from anytron.task.rewards.scoring import RewardSum
from tests.core.task.data.tables import table_of

pytestmark = pytest.mark.timeout(1200)


def sample(response: str, /, **data) -> Sample:
    return Sample("p", "?", response, (1,), (1,), (-0.1,), finished=True, data=data)


@pytest.fixture
def score(tmp_path):
    """Score samples by one reward, in its processes."""
    with contextlib.ExitStack() as stack:

        def scored(function, samples, **options):
            rewards = RewardSum.from_config([RewardSection(function=function, options=options, timeout_s=600)])
            rewards.check([table_of(*(one.data for one in samples))])
            return stack.enter_context(rewards.start(tmp_path / "logs", 600))(samples)

        yield scored


RIGHT = [
    ("\\boxed{0.5}", "1/2"),
    ("so $\\frac{2}{4}$", "\\frac12"),
    ("$(x+1)^2$", "x^2+2x+1"),
    ("\\boxed{1,234}", "1234"),
]
WRONG = [("\\boxed{2}", "1/2"), ("no idea", "3"), ("", "3"), ("$\\frac{1}{$", "3"), ("1" * 5000, "3")]
BOMBS = ["$9^{9^{9^{9}}}$", "\\boxed{(((10!)!)!)!}", "$" + "{" * 5000 + "}" * 5000 + "$"]


def test_mathematics_and_its_bombs(score):
    cases = [*RIGHT, *WRONG, *((bomb, "3") for bomb in BOMBS)]
    found = score("math", [sample(text, answer=answer) for text, answer in cases], step_timeout_s=2)
    expected = [1.0] * len(RIGHT) + [0.0] * len(WRONG)
    assert found.total.tolist()[: len(expected)] == expected
    bombs = found.total[len(expected) :].tolist()
    assert all(
        math.isnan(one) or one == 0 for one in bombs
    )  # too long, or given up: never right, and the rest is scored
    assert any("took more than 2 s" in failure.why for failure in found.failures["math"].values())


DOUBLE = [{"input": "2\n", "output": "4"}, {"input": "5\n", "output": "10\n"}]
ASSERTS = ["assert double(2) == 4", "assert double(5) == 10"]


def test_programs_are_run_on_their_tests(score):
    program, function = "print(int(input()) * 2)", "def double(x):\n    return x * 2"
    cases = [
        (f"Here:\n```python\nprint(3)\n```\nbetter:\n```python\n{program}\n```", DOUBLE, 1.0),
        (program, DOUBLE, 1.0),
        ("```python\nprint(4)\n```", DOUBLE, 0.0),
        ("", DOUBLE, 0.0),
        (function, ASSERTS, 1.0),
        (function, "\n".join(ASSERTS), 1.0),
        ("def double(x):\n    return 4", ASSERTS, 0.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),  # ends well, and before its tests
        ("raise SystemExit", ASSERTS, 0.0),
        ("def double(x):\n    while True: pass", ASSERTS, 0.0),
        ("import os\nwhile True: os.fork()", DOUBLE, 0.0),
    ]
    samples = [sample(text, tests=tests) for text, tests, _ in cases]
    found = score("code", samples, test_timeout_s=6.0)
    assert found.total.tolist() == [reward for *_, reward in cases]
    assert found.failures["code"] == {}


def test_what_a_program_that_fails_was_refused_is_in_the_log(caplog):
    """One that passes all the same, and one that asked for nothing, leave no word."""
    from anytron.task.rewards.code import Code

    trying = "import ctypes\nctypes.CDLL(None).socket(2, 1, 0)\n"
    code = Code(test_timeout_s=60.0)
    tests = [*DOUBLE, {"input": "1\n", "output": "3\n"}]
    assert code([sample(f"{trying}print(int(input()) * 2)", tests=DOUBLE), sample("print(4)", tests=tests)]) == [
        1.0,
        0.0,
    ]
    assert caplog.messages == []
    assert code([sample(f"{trying}print(int(input()) * 2)", tests=tests)]) == [0.0]
    (said,) = caplog.messages
    assert said.endswith(": a program failed, and the sandbox had refused it system calls: socket (3)")


def test_some_tests_that_pass_can_count(score):
    tests = [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}, {"input": "3", "output": "9"}]
    assert score("code", [sample("print(2 * int(input()))", tests=tests)], partial=True).total.tolist() == [
        pytest.approx(2 / 3)
    ]


EARNED_FOR_NOTHING = [
    [{"input": "2", "output": None}],  # by print(None)
    [{"input": None, "output": "4"}],
    [{"input": "2", "output": ["4"]}],
    [{"input": "2", "output": ""}, {"input": "3", "output": " \n"}],  # by an empty program
    ["assert double(2) == 4", " "],
    "",
]


@pytest.mark.parametrize(
    "tests",
    [None, [], 3, [3], [{"input": "1"}], ["assert 1", {"input": "", "output": ""}], *EARNED_FOR_NOTHING],
)
def test_prompts_without_usable_tests_are_refused_before_the_run(tests, monkeypatch):
    from anytron.task.rewards.code import Code

    monkeypatch.setattr(Code, "check_machine", lambda self: None)
    rewards = RewardSum.from_config([RewardSection(function="code")])
    with pytest.raises(DataError, match=r"(?s)no tests in its entry 'tests'.*prompt p7, for rewards\[0\] \(code\)"):
        rewards.check([table_of({"tests": tests}, name="p7")])


@pytest.mark.parametrize(
    ("function", "data"),
    [
        ("judge", {"answer": None}),
        ("judge", {"answer": " "}),
        ("reasoning_gym", {"reasoning_gym": None}),
    ],
)
def test_a_null_is_no_entry(function, data):
    """A column that a row of a Parquet file does not have is null."""
    from anytron.task.rewards.registered import REWARDS

    options = {"url": "http://localhost:1", "model": "m", "key": "answer"} if function == "judge" else {}
    with pytest.raises(DataError):
        REWARDS[function](**options).check_prompt(data)


def test_programs_may_have_to_print_nothing_in_some_tests():
    from anytron.task.rewards.code import Code

    Code().check_prompt({"tests": [{"input": 2, "output": 4}, {"input": "", "output": ""}]})


def test_rewards_of_validation_are_looked_at_as_those_of_training():
    config = RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "validation": {
                "sets": [
                    {
                        "name": "programs",
                        "data": {"source": "jsonl"},
                        "rewards": [{"function": "code", "options": {"sandbox": "reduced", "memory_gb": 1}}],
                    }
                ]
            },
        }
    )
    found = {(one.severity, one.key) for one in reward_diagnostics(config)}
    place = "validation.sets.0.rewards.0.options"
    assert found == {("warning", f"{place}.sandbox"), ("error", f"{place}.memory_gb")}


def test_a_sandbox_that_cannot_be_is_refused_before_the_run():
    rewards = RewardSum.from_config([RewardSection(function="code", options={"memory_gib": 0.001})])
    with pytest.raises(
        ConfigError, match=r"(?s)cannot confine programs in a sandbox \(full\).*rewards\[0\].*sandbox: reduced"
    ):
        rewards.check([])


ESCAPE = "__import__('os').system('touch {0}') or open('{0}', 'w') or 1"


def test_a_verifier_that_evaluates_answers_can_do_no_harm(score, tmp_path):
    """``countdown`` of reasoning-gym calls eval: without confinement the answer below runs a program."""
    (prompt,) = load_prompts(DataSection(source="reasoning_gym", options={"task": "countdown", "count": 1}))
    mark, unconfined = tmp_path / "mark", tmp_path / "unconfined"
    program = (
        "import sys; from anytron.task.data.reasoning_gym import reasoning_gym as prompts; "
        "from anytron.task.rewards.matching import ReasoningGym; from anytron.task.rewards import Sample; "
        "(p,) = prompts('countdown', count=1); "
        "ReasoningGym()([Sample('p', '?', sys.argv[1], (1,), (1,), (0.0,), True, p.data)])"
    )
    subprocess.run([sys.executable, "-c", program, ESCAPE.format(unconfined)], check=True)
    assert unconfined.exists()  # the hole is real

    found = score("reasoning_gym", [sample(one, **prompt.data) for one in (ESCAPE.format(mark), prompt.data["answer"])])

    assert not mark.exists()
    assert found.total[1] == 1.0
    assert found.total[0] < 0.1


def test_prompts_of_reasoning_gym_and_their_verifier(score):
    options = {"task": "spell_backward", "count": 3, "min_word_len": 3, "max_word_len": 3, "instructions": "\n="}
    prompts = list(load_prompts(DataSection(source="reasoning_gym", options=options)))
    assert [prompt.id for prompt in prompts] == [f"spell_backward-{index}" for index in range(3)]
    assert all(prompt.text.startswith("Spell") and prompt.text.endswith("\n=") for prompt in prompts)
    first = prompts[0]
    word = first.data["reasoning_gym"]["metadata"]["word"]
    assert first.data["answer"] == first.data["response"] == word[::-1]
    answers = [f" {word[::-1]} \n", f"{word[-1]}00", "", "[[[" + word[::-1]]
    found = score("reasoning_gym", [sample(one, **first.data) for one in answers])
    assert found.total.tolist() == pytest.approx([1.0, 1 / 3, 0.0, 0.0], abs=1e-6)
    with_pattern = score("reasoning_gym", [sample(answers[3], **first.data)], pattern=r"\[{3}(.*)")
    assert with_pattern.total.tolist() == [1.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "spel_backward"}, r"no task 'spel_backward'.*spell_backward"),
        ({"task": "spell_backward", "min_word_len": 0}, "min_word_len must be positive"),
        ({"task": "spell_backward", "words": 3}, "words"),
    ],
)
def test_what_reasoning_gym_has_not_is_refused(options, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        list(load_prompts(DataSection(source="reasoning_gym", options={"count": 1, **options})))


def test_functions_of_a_run_score_at_the_same_time(tmp_path):
    """Each waits until the other has begun."""
    (tmp_path / "r.py").write_text(
        "import pathlib, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "def meet(samples, me, other):\n"
        "    (here / me).touch()\n"
        "    end = time.monotonic() + 300\n"
        "    while not (here / other).exists():\n"
        "        assert time.monotonic() < end, 'alone'\n"
        "        time.sleep(0.01)\n"
        "    return [1.0] * len(samples)\n"
    )
    sections = [
        RewardSection(function=f"{tmp_path}/r.py:meet", name=me, options={"me": me, "other": other}, timeout_s=400)
        for me, other in (("one", "two"), ("two", "one"))
    ]
    with RewardSum.from_config(sections).start(tmp_path / "logs", 600) as both:
        assert both([sample("a")]).total.tolist() == [2.0]
    assert (tmp_path / "logs" / "reward-two-0.log").exists()


def test_one_function_that_stops_the_run_does_not_wait_for_the_others(tmp_path):
    (tmp_path / "r.py").write_text(
        "import time\n"
        "def slow(samples):\n    time.sleep(500)\n    return [1.0] * len(samples)\n"
        "def bad(samples):\n    raise LookupError('no opinion')\n"
    )
    sections = [RewardSection(function=f"{tmp_path}/r.py:{name}", timeout_s=600) for name in ("slow", "bad")]
    began = time.monotonic()
    with RewardSum.from_config(sections).start(tmp_path / "logs", 600) as both, pytest.raises(DataError, match="bad"):
        both([sample("a")])
    assert time.monotonic() - began < 400


def test_a_class_of_the_user_is_as_good_as_ours(tmp_path):
    (tmp_path / "r.py").write_text(
        "class Length:\n"
        "    def __init__(self, per=1):\n        self.per = per\n"
        "    def check_prompt(self, data):\n        assert 'x' in data\n"
        "    def __call__(self, samples):\n"
        "        return [len(one.response_text) / self.per if one.response_text else ValueError('nothing to see')\n"
        "                for one in samples]\n"
    )
    rewards = RewardSum.from_config([RewardSection(function=f"{tmp_path}/r.py:Length", options={"per": 2})])
    rewards.check([table_of({"x": 1})])
    with rewards.start(tmp_path / "logs", 600) as score:
        found = score([sample("abcd"), sample("")])
    assert found.total[0] == 2.0
    assert found.failures["Length"][1].why == "ValueError: nothing to see"
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.function, with its options"):
        RewardSum.from_config([RewardSection(function=f"{tmp_path}/r.py:Length", options={"pre": 2})])

"""Whatever a configuration names, and however it is wrong: the error is about the user's file.

Every kind of function is tried with every fault. The kinds are read from the sources, and the keys from the page of
keys: one more of either without a case here is a failure.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace

import pytest

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import load_advantage, policy_loss_function, with_advantages
from anytron.base import functions
from anytron.base.errors import AnytronError, DataError
from anytron.base.functions import Called, Kind
from anytron.config.algorithm import AlgorithmSection
from anytron.config.data import DataSection
from anytron.config.document import render
from anytron.config.generation import EnvironmentSection
from anytron.config.imports import resolve
from anytron.config.schema import ModelSection
from anytron.config.scoring import RewardSection
from anytron.record.sinks.delivery import MetricSinks, sink_diagnostics
from anytron.run.preflight.forms import reference_answers
from anytron.task.data.pretrained import load_image_processor, load_tokenizer
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.data.sources import load_prompts
from anytron.task.environments import AgentTask, Task, Turn
from anytron.task.environments.pool import check_environment
from anytron.task.environments.worker import Call, answer_agent
from anytron.task.environments.worker import answer as environment_answer
from anytron.task.isolation.failure import Failure
from anytron.task.rewards.answer import answer as reward_answer
from anytron.task.rewards.registered import made
from anytron.task.rewards.scoring import RewardSum
from anytron.task.rewards.worker import WatchedSamples
from anytron_verifiers.messages import found_in
from tests.core.algorithms.test_registered import BATCH, OUTPUTS, REWARDS, TRAINED
from tests.core.record.sinks.conftest import Told, configuration
from tests.core.task.data.tables import table_of
from tests.core.task.rewards.test_scoring import SAMPLES
from tests.house import PACKAGES, modules

PROMPT = TokenizedPrompt("p0", "31>", (1,), {"answer": "13"})
TASK = Task("p0", "31>", {}, seed=0, max_turns=2)


def kinds() -> dict[str, Kind]:
    """All that the sources make, by their keys."""
    found = {}
    for package in PACKAGES:
        for name, path in modules(package).items():
            if re.search(r"\bKind\(", path.read_text()) and name != functions.__name__:
                every = vars(importlib.import_module(name)).values()
                found |= {one.key: one for one in every if isinstance(one, Kind)}
    return found


def called_of(kind: Kind) -> list[Called]:
    """The function, or the class and its methods."""
    return list(dict.fromkeys([kind.call, *([kind.made] if kind.made else []), *kind.methods]))


def failed(failure) -> None:
    raise DataError(failure.what, where="reward", why=failure.why, fix=failure.fix)


def use_reward(path, folder):
    section = RewardSection(function=path)
    rewards = RewardSum.from_config([section])
    rewards.check([table_of(PROMPT.data)])
    reference_answers(section)(PROMPT)
    with WatchedSamples(SAMPLES, lambda position: None) as samples:
        for failure in reward_answer(made(path, {}, "rewards[0]"), samples).failures:
            failed(failure)


def use_environment(path, folder):
    section = EnvironmentSection(path=path)
    check_environment(section)
    make = resolve(path, KINDS["environment.path"])
    environments = {}
    for call in (Call(0, "reset", TASK), Call(0, "step", Turn("a", (1,), finished=True)), Call(0, "close")):
        found = environment_answer(call, environments, make)
        if "failure" in found:
            failed(Failure(**found["failure"]))


def use_agent(path, folder):
    check_environment(EnvironmentSection(agent=path))
    task = AgentTask("p0", "31>", {}, 0, 2, "http://127.0.0.1:1/v1", "key", "policy")
    found = answer_agent(Call(0, "run", task), resolve(path, KINDS["environment.agent"]), {})
    if "failure" in found:
        failed(Failure(**found["failure"]))


def use_advantage(path, folder):
    section = AlgorithmSection(advantage=path)
    load_advantage(section)
    with_advantages(BATCH, REWARDS, section)


def use_loss(path, folder):
    section = AlgorithmSection(loss=path)
    policy_loss_function(section)
    PolicyLoss(section)(OUTPUTS, TRAINED)


def use_sink(path, folder):
    config = configuration(folder, [{"sink": path}])
    for one in sink_diagnostics(config):
        raise DataError(one.message, where=one.key, why=one.message, fix=one.fix)
    told, run = Told(), Run(folder / "run")
    with MetricSinks(config, run, told, after=None) as sinks:
        sinks.write({"step": 1})
        sinks.write({"step": 1}, validation=True)
    if told.warnings:
        why = "\n".join([*told.warnings, *run.lines])
        raise DataError(told.warnings[0], where="a sink", why=why, fix="\n".join(run.lines))


@dataclass
class Run:
    """A run's directory that remembers its log."""

    path: object
    lines: list = None

    def log(self, text):
        self.lines = [*(self.lines or []), text]


def use_tokenizer(path, folder):
    load_tokenizer(ModelSection(config={"model_type": "qwen3"}, tokenizer=path))


def use_processor(path, folder):
    load_image_processor(ModelSection(config={"model_type": "qwen3"}, tokenizer="t", processor=path))


@dataclass(frozen=True)
class Case:
    """What a function or method does: what is right, and on a line each what else it may do."""

    good: str
    wrong: str = ""


USE = {
    "rewards[].function": use_reward,
    "environment.path": use_environment,
    "environment.agent": use_agent,
    "algorithm.advantage": use_advantage,
    "algorithm.loss": use_loss,
    "data.source": lambda path, folder: list(load_prompts(DataSection(source=path))),
    "model.tokenizer": use_tokenizer,
    "model.processor": use_processor,
    "tracking.sinks[].sink": use_sink,
    "environment.options.tool_calls": lambda path, folder: found_in("a", resolve(path, KINDS[TOOL_CALLS])),
}
"""What a run does with it, as far as this is done in one process: checks before the start, and the calls."""
TOOL_CALLS = "environment.options.tool_calls"
NUMBERS = Case(
    "return [1.0] * len(samples)",
    """return None
return 0.5
return [1.0]
return [1.0] * 9
return torch.ones(2)
return {'a': 1}
return [None] * len(samples)
return ['1'] * len(samples)
return [float('nan')] * len(samples)
return [torch.ones(2)] * len(samples)
return [later() for _ in samples]""",
)
MADE, NOTHING = Case("self.made = True"), Case("pass")
CASES = {
    "A reward function": NUMBERS,
    "A reward's class": MADE,
    "A reward's method __call__": NUMBERS,
    "A reward's method check_prompt": Case("pass", "return False\nreturn True\nreturn 'refused'"),
    "A reward's method check_machine": NOTHING,
    "A reward's method right_answer": Case("return '13'"),
    "An environment's class": MADE,
    "An environment's method reset": Case("pass", "return 'hello'\nreturn Observation(text='a')"),
    "An environment's method step": Case(
        "return Observation(text='a')",
        """return None
return 'a'
return {'text': 'a'}
return Observation(text='a'), 1.0, True, {}
return Observation(messages=[{'role': 'tool', 'content': torch.ones(1)}])""",
    ),
    "An environment's method close": NOTHING,
    "An agent": Case(
        "return 1.0",
        """return 'a'
return [1.0]
return {'reward': 1.0}
return float('nan')""",
    ),
    "An estimator of advantages": Case(
        "return Advantages(torch.zeros(5))",
        """return None
return torch.zeros(5)
return Advantages(None)
return Advantages([0.0] * 5)
return Advantages(torch.zeros(2))
return Advantages(torch.zeros(5) / 0)""",
    ),
    "A policy's loss": Case(
        "return TokenLosses(-tokens.log_probs)",
        """return None
return tokens.log_probs
return TokenLosses(0.0)
return TokenLosses(tokens.log_probs.sum())
return TokenLosses(tokens.log_probs.detach())
return TokenLosses(tokens.log_probs, {'a': 1.0})
return TokenLosses(tokens.log_probs, [1.0])""",
    ),
    "A source of prompts": Case(
        "return [Prompt('a', text='b')]",
        "return None\nreturn 5\nreturn 'ab'\nreturn ['a']\nreturn [{'prompt': 'a'}]\nreturn [later()]\nyield None",
    ),
    "A tokenizer's function": Case("return tokenizer()", "return None\nreturn 'gpt2'"),
    "A processor's function": Case("return image_processor()", "return None\nreturn 'clip'"),
    "A sink's class": MADE,
    "A sink's method write": NOTHING,
    "A sink's method write_validation": NOTHING,
    "A sink's method close": NOTHING,
    "A format of tool calls": Case(
        "return text, []",
        """return None
return text
return text, None
return text, ['f']
return text, [('f', {'a': 1})]""",
    ),
}
HEAD = """\
import torch
from anytron.algorithms.contract import Advantages, TokenLosses
from anytron.task.data import Prompt
from anytron.task.environments import Observation
from anytron.record.sinks import MetricSink
from examples.count_shapes import image_processor, tokenizer
async def later(): ...
async def generated(): yield 1
"""
FAULTS = {
    "other arguments": ("one_too_many", "", None),
    "raises": ("", "", "raise LookupError('no opinion')"),
    "exits": ("", "", "raise SystemExit(3)"),
    "is async": ("", "async ", None),
    "returns a coroutine": ("", "", "return later()"),
    "returns an async generator": ("", "", "return generated()"),
}
"""By their names: one more argument, what stands before ``def``, and what is done; None = what is right."""
NO_FAULTS_IF_AWAITED = ("is async", "returns a coroutine")
LEFT_OUT = "is left out"
KINDS = kinds()


def uncovered(known: dict[str, Kind]) -> list[str]:
    """What has no case here."""
    names = [one.name for kind in known.values() for one in called_of(kind)]
    return [key for key in known if key not in USE] + [name for name in names if name not in CASES]


def is_constructor(kind: Kind, one: Called) -> bool:
    return bool(kind.methods) and one is (kind.made or kind.call)


def trials() -> list[tuple[str, str, str]]:
    found = []
    for key, kind in KINDS.items():
        for one in called_of(kind):
            faults = [fault for fault in FAULTS if not (is_constructor(kind, one) and fault.startswith("returns"))]
            faults = [fault for fault in faults if not (one.awaited and fault in NO_FAULTS_IF_AWAITED)]
            found += [(key, one.name, fault) for fault in (*faults, *CASES[one.name].wrong.splitlines())]
    return found


def written(kind: Kind, one: Called, fault: str) -> tuple[str, int]:
    """A file with such a function or class of which one is wrong, and the line of its definition."""
    methods = [("__init__", kind.made or kind.call), *((method.method, method) for method in kind.methods)]
    in_class = is_constructor(kind, one) or one in kind.methods
    indent, lines, at = "", HEAD.splitlines(), 0
    methods = [(name, called) for name, called in methods if fault != LEFT_OUT or called is not one]
    if in_class:
        lines.append("class Mine(MetricSink):" if kind.key == "tracking.sinks[].sink" else "class Mine:")
        indent = "    "
    for name, called in methods if in_class else [("Mine", one)]:
        more, before, body = FAULTS.get(fault, ("", "", fault)) if called is one and fault else ("", "", None)
        names = [*(["self"] if in_class else []), *called.takes, *([more] if more else [])]
        lines.append(f"{indent}{before}def {name}({', '.join(names)}):")
        at = len(lines) if called is one else at
        lines.append(f"{indent}    {CASES[called.name].good if body is None else body}")
    return "\n".join(lines) + "\n", at


def complain(folder, key: str, name: str, fault: str) -> None:
    """Use a function that is wrong, and look at what a person is told."""
    kind = KINDS[key]
    one = next(one for one in called_of(kind) if one.name == name)
    text, line = written(kind, one, fault)
    (file := folder / "mine.py").write_text(text)
    with pytest.raises(AnytronError) as caught:
        USE[key](f"{file}:Mine", folder)
    error = caught.value
    assert all((error.what, error.where, error.why, error.fix))
    raised = fault in ("raises", "exits")
    line -= is_constructor(kind, one) and not raised  # the class's
    assert f"line {line + raised} of {file}" in error.why
    if fault not in ("exits", "is async"):
        assert one.given in error.fix
    if raised:
        frames = re.findall(r'File "([^"]+)", line (\d+)', error.why)
        assert frames[0] == (str(file), str(line + 1)), "our frames are none of the user's business"
    if "async" in fault or "coroutine" in fault:
        assert "async" in str(error)
        assert "without await" in str(error)


@pytest.mark.parametrize(("key", "name", "fault"), trials())
def test_what_is_wrong_is_said_with_the_file_and_line_of_the_user(tmp_path, key, name, fault):
    complain(tmp_path, key, name, fault)


@pytest.mark.parametrize(
    ("key", "name"), [(key, one.name) for key, kind in KINDS.items() for one in kind.methods if not one.optional]
)
def test_a_class_without_a_method_that_it_must_have_is_refused(tmp_path, key, name):
    method = next(one for one in KINDS[key].methods if one.name == name)
    (file := tmp_path / "mine.py").write_text(written(KINDS[key], method, LEFT_OUT)[0])
    with pytest.raises(AnytronError, match="is missing"):
        USE[key](f"{file}:Mine", tmp_path)


@pytest.mark.parametrize(("key", "name"), [(key, one.name) for key, kind in KINDS.items() for one in called_of(kind)])
def test_what_is_right_is_not_refused(tmp_path, key, name):
    one = next(one for one in called_of(KINDS[key]) if one.name == name)
    (tmp_path / "mine.py").write_text(written(KINDS[key], one, "")[0])
    USE[key](f"{tmp_path}/mine.py:Mine", tmp_path)


def test_every_key_that_may_name_a_function_is_tried():
    """By the page of keys, but for tool_calls, an option of a backend's environment."""
    assert uncovered(KINDS) == []
    keys, section = set(), ""
    for line in render().splitlines():
        section = line[3:] if line.startswith("## ") else section.removeprefix("validation.sets.")
        keys |= {f"{section}.{name}" for name in re.findall(r"^\| `([^`]+)` .*\.py:", line)}
    assert keys == {key.replace("[]", "") for key in KINDS if key != TOOL_CALLS}


def test_a_kind_without_a_case_is_noticed():
    assert uncovered({**KINDS, "new.key": Kind("new.key", Called("A new kind"))}) == ["new.key", "A new kind"]
    more = replace(KINDS["environment.path"], methods=(Called("A new method", method="new"),))
    assert uncovered({more.key: more}) == ["A new method"]


@pytest.mark.parametrize(
    ("name", "instead", "fault"),
    [
        ("place", lambda function: "somewhere", "is async"),
        ("_line", lambda error, function: "somewhere", "raises"),
        ("_OURS", (), "raises"),
        ("is_async", lambda found: bool(found.close()), "returns a coroutine"),
    ],
)
def test_a_message_without_the_file_or_with_our_frames_or_of_what_is_never_awaited_would_be_noticed(
    tmp_path, monkeypatch, name, instead, fault
):
    complain(tmp_path, "algorithm.loss", "A policy's loss", fault)
    monkeypatch.setattr(functions, name, instead)
    with pytest.raises(AssertionError):
        complain(tmp_path, "algorithm.loss", "A policy's loss", fault)

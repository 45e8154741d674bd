"""A remedy that an error names works when it is typed: the key exists, takes the value, and may change on a resume.

The sources are read, not the page of errors: advice is also put together outside of the calls that raise.
"""

from __future__ import annotations

import re

import pytest

from anytron.record.checkpoint.differences import REMEDIES, is_free
from tests.docs.remedies import Remedy, exists, mentions, refusal, remedies, remedies_of
from tests.house import ROOT

BEFORE = re.compile(
    r"core/anytron/(?:config|cli|proof|run/preflight|task/data)/"
    r"|core/anytron_conformance/"
    r"|core/anytron/record/(?:tracking/(?:document|metric_table)|checkpoint/differences)\.py"
    r"|backends/anytron_megatron/(?:checks|estimate)/"
    r"|backends/anytron_(?:rollout|vllm)/(?:checks|features)\.py"
    r"|plugins/ascend/anytron_ascend/(?:options|platform|adaptors/mindspeed_llm|mindspeed_llm/\w+)\.py"
)
"""What these say comes before the first step, of the configuration, the data and the machine: a run with a checkpoint
has passed them, and its configuration is the same."""
STARTS = {
    "backends/anytron_megatron/critic.py": "the value head is read while the engine is built",
    "backends/anytron_megatron/engine.py": "asked by programs of one's own: a run's loop asks for what the run has",
    "backends/anytron_megatron/models/bridge.py": "a configuration is read while the engine is built",
    "backends/anytron_megatron/lora/adapters.py": "adapters are attached while the engine is built",
    "backends/anytron_megatron/lora/peft_directory.py": "the adapter is read before the first step",
    "backends/anytron_rollout/transformers_engine.py": "found while the rollout engine is built",
    "backends/anytron_verifiers/source.py": "environments are loaded before the first step",
    "backends/anytron_verifiers/tasksets.py": "tasksets are loaded before the first step",
    "core/anytron/task/rewards/matching.py": "right answers are looked at before the first step",
    "core/anytron/task/rewards/judge.py": "right answers are looked at before the first step",
    "plugins/cuda/anytron_cuda/gpus.py": "GPUs are checked before a process starts",
}
"""Files elsewhere whose errors come up before the first step, too, and why."""
NEW_RUN = re.compile(r"\b(?:new run|start over)\b")
INDIRECT = {
    "critic.optimizer.lr": "trainer/non_finite.py fills in the section",
    "critic.optimizer.warmup_steps": "trainer/non_finite.py fills in the section",
    "optimizer.lr": "trainer/non_finite.py fills in the section",
    "optimizer.warmup_steps": "trainer/non_finite.py fills in the section",
}


NOT_KEYS = {
    "platform.choice": "a check of the doctor",
    "platform.modules": "a check of the doctor",
    "platform.md": "the end of a page's name",
    "platform.py": "the name of a file",
}


def later(remedy: Remedy) -> bool:
    """Whether a run that has a checkpoint can meet it, and is not told to begin anew."""
    return not (BEFORE.match(remedy.file) or remedy.file in STARTS or NEW_RUN.search(remedy.text))


def test_the_sources_are_read():
    found = remedies()
    assert len(found) > 150
    assert len({one.key for one in found if later(one)}) > 35
    assert {one.file.split("/")[0] for one in found} == {"core", "backends", "plugins"}
    assert all((ROOT / file).is_file() for file in STARTS)
    assert {one.file for one in found} >= STARTS.keys(), "what is listed must still name a key"


def test_a_key_that_a_remedy_names_exists():
    assert [one for one in remedies() if not exists(one.key)] == []


def test_every_key_that_a_text_names_exists():
    """Also where no verb asks for it: "wait for the first checkpoint (checkpoint.every)"."""
    missing = {one.key for one in mentions() if not exists(one.key)}
    assert missing == NOT_KEYS.keys()


def test_a_value_that_a_remedy_names_is_accepted():
    named = [one for one in remedies() if one.value]
    assert len(named) > 60
    assert [(one, said) for one in named if (said := refusal(one.key, one.value))] == []


def test_a_key_that_the_remedy_of_a_running_run_names_may_change_on_a_resume():
    assert [one for one in remedies() if later(one) and not is_free(one.key)] == []


def test_every_key_that_may_change_as_a_remedy_is_one():
    named = {one.key for one in remedies() if later(one)} | INDIRECT.keys()
    assert sorted(REMEDIES.keys() - named) == []


def test_a_remedy_that_sets_an_advantage_without_critic_removes_the_critic_too():
    """Otherwise the schema refuses the section next."""
    named = [one for one in remedies() if (one.key, one.value) == ("algorithm.advantage", "grpo")]
    assert len(named) >= 3
    assert [one for one in named if "remove the section critic" not in one.text] == []


@pytest.mark.parametrize(
    ("text", "key", "value", "wrong"),
    [
        ("lower optimizer.lrr", "optimizer.lrr", "", "missing"),
        ("choose executor.kinds", "executor.kinds", "", "missing"),
        ("or go on: trainer.on_non_finite=pause", "trainer.on_non_finite", "pause", "refused"),
        ("set algorithm.max_steps_without_signal=0.", "algorithm.max_steps_without_signal", "0", "refused"),
        ("raise rollout.temperature, or look again", "rollout.temperature", "", "fixed"),
        ("lower rewards[].weight", "rewards.*.weight", "", ""),
        ("engine.offload=[optimizer, gradients] frees it", "engine.offload", "[optimizer, gradients]", ""),
        ("set rollout.options.wurst=1", "rollout.options.wurst", "1", ""),
        ("begin a new run with rollout.temperature=0.5", "rollout.temperature", "0.5", ""),
    ],
)
def test_a_wrong_remedy_is_noticed(text, key, value, wrong):
    (found,) = remedies_of(text, "core/anytron/run/trainer/loop.py")
    assert (found.key, found.value) == (key, value)
    assert exists(key) is (wrong != "missing")
    assert bool(value and refusal(key, value)) is (wrong == "refused")
    assert wrong == "missing" or (later(found) and not is_free(key)) is (wrong == "fixed")


def test_a_text_that_asks_for_nothing_is_none():
    assert list(remedies_of("trainer.output_dir", "f.py")) == []
    assert list(remedies_of("neither model.path nor model.processor has one", "f.py")) == []
    assert list(remedies_of("set the model, or the data", "f.py")) == []

"""Check settings of a run against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from anytron.config.diagnostics import Diagnostic
from anytron.config.options import model_diagnostics
from anytron.task.rewards.registered import REWARDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from anytron.config.schema import RunConfig


WITH = "algorithm.name=sft"
OF_ALGORITHM = ("name", "aggregation", "length_constant")
"""Keys of section ``algorithm`` that mean something here."""
OF_A_SET = ("name", "data")
"""Keys of a validation set that mean something here."""


def supervised_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find settings of reinforcement learning in a run of supervised fine-tuning; nothing in any other run.

    Args:
        config: As the user has written it; keys that have their default ask for nothing.
    """
    if not config.supervised:
        return
    for key, given, what in (
        ("rewards", config.rewards, "no response is scored"),
        ("environment", config.environment, "nobody answers the model"),
        ("critic", config.critic, "there are no advantages to estimate"),
        ("teacher", config.teacher, "the data teach"),
        ("reward_model", config.reward_model, "no response is scored"),
        ("engine.offload", config.engine.offload, "training never leaves the device to a rollout engine"),
        ("trainer.rollout_log_prob_tolerance", config.trainer.rollout_log_prob_tolerance, "there is no rollout"),
    ):
        if given:
            yield _useless(key, what)
    sections = {"data": config.data}
    for index, one in enumerate([] if config.validation is None else config.validation.sets):
        sections[f"validation.sets.{index}.data"] = one.data
    for key, data in sections.items():
        if data.continue_final_message:
            yield _useless(f"{key}.continue_final_message", "an assistant's last message is learnt, as the response")
        if data.on_bad_answer != "error":
            yield _useless(f"{key}.on_bad_answer", "no reward reads an answer")
    yield from _changed("rollout", config.rollout, (), "nothing is generated")
    yield from _changed("algorithm", config.algorithm, OF_ALGORITHM, "the loss is the responses' cross-entropy")
    for index, one in enumerate([] if config.validation is None else config.validation.sets):
        key = f"validation.sets.{index}"
        yield from _changed(key, one, OF_A_SET, "what is measured is the loss of the responses that the set has")
    if config.algorithm.aggregation == "length-constant" and config.algorithm.length_constant is None:
        message = "aggregation=length-constant needs it: there is no rollout.max_new_tokens to take it from"
        yield Diagnostic("error", "algorithm.length_constant", message, "set it to the longest response, in tokens")


def _changed(key: str, section: BaseModel, meant: Collection[str], what: str) -> Iterator[Diagnostic]:
    """Find the keys of a section that have another value than their default."""
    for name, field in type(section).model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        if name not in meant and getattr(section, name) != default:
            yield _useless(f"{key}.{name}", what)


def _useless(key: str, what: str) -> Diagnostic:
    return Diagnostic("error", key, f"with {WITH} it has no meaning: {what}", "remove it")


def reward_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find options that a registered reward does not take, and say loudly where programs run half-protected."""
    places = {f"rewards.{index}": section for index, section in enumerate(config.rewards)}
    for number, one in enumerate([] if config.validation is None else config.validation.sets):
        places |= {f"validation.sets.{number}.rewards.{index}": section for index, section in enumerate(one.rewards)}
    for place, section in places.items():
        key, reward = f"{place}.options", REWARDS.get(section.function)
        if isinstance(reward, type) and issubclass(reward, BaseModel):
            yield from model_diagnostics(reward, section.options, key)
        if section.function == "code" and section.options.get("sandbox") == "reduced":
            message = "programs that the model writes can read whatever you can read"
            yield Diagnostic("warning", f"{key}.sandbox", message, "full, where the kernel allows it")

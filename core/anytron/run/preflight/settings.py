"""Check the settings of a run against each other, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from anytron.config.diagnostics import Diagnostic
from anytron.config.options import model_diagnostics
from anytron.task.rewards.registered import REWARDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from anytron.config.algorithm import AlgorithmSection
    from anytron.config.running import ParallelSection
    from anytron.config.schema import RunConfig

SUPERVISED = "algorithm.name=sft"
"""The setting that chooses supervised fine-tuning, for messages."""
ALGORITHM_KEYS = ("name", "aggregation", "length_constant")
"""Keys of section ``algorithm`` that have an effect in supervised fine-tuning."""
SET_KEYS = ("name", "data")
"""Keys of a validation set that have an effect in supervised fine-tuning."""


def setting_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find settings that contradict each other, and settings that are probably a mistake.

    Yields:
        Errors: impossible sizes; steps or ranks to profile that the run does not have. Warnings: a KL estimator whose
        gradient is not the gradient of the divergence; GSPO with an average that differs from its paper; an importance
        correction that ignores top-p and top-k.
    """
    yield from _profile(config)
    yield from _batches(config)
    yield from _aggregation(config.algorithm)
    yield from _penalty(config.algorithm)
    yield from _correction(config)
    yield from sequence_parallel_diagnostics(config.parallel, "parallel.")
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        yield Diagnostic(
            "error",
            "rollout.min_new_tokens",
            f"{config.rollout.min_new_tokens} is more than rollout.max_new_tokens ({config.rollout.max_new_tokens})",
            "lower rollout.min_new_tokens, or raise rollout.max_new_tokens",
        )
    optimizers = {"optimizer": config.optimizer}
    if config.critic is not None:
        optimizers["critic.optimizer"] = config.critic.optimizer
    for key, optimizer in optimizers.items():
        if optimizer.min_lr > optimizer.lr:
            message = f"{optimizer.min_lr:g} is more than {key}.lr ({optimizer.lr:g})"
            yield Diagnostic("error", f"{key}.min_lr", message, f"lower {key}.min_lr, or raise {key}.lr")


def _batches(config: RunConfig) -> Iterator[Diagnostic]:
    prompts, replicas = config.data.prompts_per_step, config.parallel.data_parallel_size
    updates = config.algorithm.mini_batches
    if updates > prompts:
        yield Diagnostic(
            "error",
            "algorithm.mini_batches",
            f"a step has {updates} mini-batches but only {prompts} prompts, and the samples of a prompt stay together",
            f"set it to at most {prompts}, or raise data.prompts_per_step",
        )
    elif (smallest := prompts // updates * config.group_size) < replicas:
        others = " or rollout.samples_per_prompt, or lower algorithm.mini_batches"
        yield Diagnostic(
            "error",
            "parallel.data_parallel_size",
            f"a mini-batch has {smallest} sequences, too few for {replicas} data-parallel replicas",
            f"raise data.prompts_per_step{'' if config.supervised else others}",
        )
    if config.algorithm.needs_groups and config.rollout.samples_per_prompt == 1:
        yield Diagnostic(
            "error",
            "rollout.samples_per_prompt",
            f"{config.algorithm.advantage if config.algorithm.compares_a_group else 'algorithm.dynamic_sampling'} "
            "compares the responses to one prompt with each other: a single response teaches nothing",
            "set it to 2 or more; 8 to 16 is usual",
        )


def sequence_parallel_diagnostics(parallel: ParallelSection, inside: str) -> Iterator[Diagnostic]:
    """Find sequence parallelism without tensor parallelism; ``inside`` is the prefix of the keys."""
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield Diagnostic(
            "error",
            f"{inside}sequence_parallel",
            f"activations cannot be split over ranks: {inside}tensor_model_parallel_size is 1",
            f"remove {inside}sequence_parallel: the default follows the tensor-parallel size",
        )


def _aggregation(algorithm: AlgorithmSection) -> Iterator[Diagnostic]:
    if algorithm.loss in ("gspo", "gspo_token") and algorithm.aggregation != "sequence-mean":
        yield Diagnostic(
            "warning",
            "algorithm.aggregation",
            f"{algorithm.loss} is a mean over responses (https://arxiv.org/abs/2507.18071, equations 5 and 13), but "
            f"{algorithm.aggregation} weights each response by its length",
            "set algorithm.aggregation=sequence-mean",
        )


def _penalty(algorithm: AlgorithmSection) -> Iterator[Diagnostic]:
    if algorithm.kl_coefficient == 0.0:
        return
    if algorithm.kl_placement == "loss" and algorithm.kl_estimator == "k1":
        yield Diagnostic(
            "warning",
            "algorithm.kl_estimator",
            "in the loss, the gradient of k1 is 0 in expectation: k1 does not constrain the policy there",
            "set it to k3 or k2, or set algorithm.kl_placement=reward",
        )
    if algorithm.kl_placement == "reward" and algorithm.kl_estimator != "k1":
        yield Diagnostic(
            "warning",
            "algorithm.kl_estimator",
            f"in the reward, {algorithm.kl_estimator} does not give the policy gradient of the KL divergence",
            "set it to k1, or set algorithm.kl_placement=loss",
        )


def _correction(config: RunConfig) -> Iterator[Diagnostic]:
    rollout, correction = config.rollout, config.corrected_algorithm.importance_correction
    left_out = [f"rollout.top_p={rollout.top_p:g}"] * (rollout.top_p < 1.0)
    left_out += [f"rollout.top_k={rollout.top_k}"] * (rollout.top_k > 0)
    if left_out and correction not in ("auto", "none"):
        yield Diagnostic(
            "warning",
            "algorithm.importance_correction",
            f"{correction} compares log-probs over the whole vocabulary, but with {' and '.join(left_out)} the rollout "
            "samples from a part of it: the correction ignores this difference",
            "set rollout.top_p=1 and rollout.top_k=0, so that rollout and training have the same distribution",
        )


def _profile(config: RunConfig) -> Iterator[Diagnostic]:
    profile, ranks = config.trainer.profile, config.parallel.world_size
    if profile is None:
        return
    for key, values, first, last, what in (
        ("steps", profile.steps, 1, config.trainer.total_steps, "steps"),
        ("ranks", profile.ranks, 0, ranks - 1, "training ranks"),
    ):
        name = f"trainer.profile.{key}"
        if wrong := [value for value in values if not first <= value <= last]:
            message = f"{wrong[0]} is not one of the run's {what}, {first} to {last}"
            yield Diagnostic("error", name, message, f"list only numbers from {first} to {last}")
        if len(set(values)) < len(values):
            yield Diagnostic("error", name, f"{values} lists a value twice", "list each value once")


def supervised_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find settings of reinforcement learning in a run of supervised fine-tuning; nothing in any other run.

    Args:
        config: The configuration as the user has written it; keys that have their default are not reported.
    """
    if not config.supervised:
        return
    for key, given, what in (
        ("rewards", config.rewards, "no response is scored"),
        ("environment", config.environment, "no environment answers the model"),
        ("critic", config.critic, "the loss uses no advantages"),
        ("teacher", config.teacher, "the data have the responses to learn"),
        ("reward_model", config.reward_model, "no response is scored"),
        ("engine.offload", config.engine.offload, "no rollout engine needs the device"),
        ("engine.on_policy", config.engine.on_policy == "bitwise", "the run has no rollout"),
        ("trainer.rollout_log_prob_tolerance", config.trainer.rollout_log_prob_tolerance, "the run has no rollout"),
    ):
        if given:
            yield _useless(key, what)
    sections = {"data": config.data}
    for index, one in enumerate([] if config.validation is None else config.validation.sets):
        sections[f"validation.sets.{index}.data"] = one.data
    for key, data in sections.items():
        if data.continue_final_message:
            yield _useless(f"{key}.continue_final_message", "the assistant's last message is the response to learn")
        if data.on_bad_answer != "error":
            yield _useless(f"{key}.on_bad_answer", "no reward reads an answer")
    yield from _changed("rollout", config.rollout, (), "nothing is generated")
    yield from _changed("algorithm", config.algorithm, ALGORITHM_KEYS, "the loss is the responses' cross-entropy")
    for index, one in enumerate([] if config.validation is None else config.validation.sets):
        key = f"validation.sets.{index}"
        yield from _changed(key, one, SET_KEYS, "validation measures the loss of the set's responses")
    if config.algorithm.aggregation == "length-constant" and config.algorithm.length_constant is None:
        message = "aggregation=length-constant needs this key: in supervised fine-tuning it has no default"
        yield Diagnostic("error", "algorithm.length_constant", message, "set it to the longest response, in tokens")


def _changed(key: str, section: BaseModel, meant: Collection[str], what: str) -> Iterator[Diagnostic]:
    """Find the keys of a section that have another value than their default."""
    for name, field in type(section).model_fields.items():
        default: Any = field.get_default(call_default_factory=True)
        if name not in meant and getattr(section, name) != default:
            yield _useless(f"{key}.{name}", what)


def _useless(key: str, what: str) -> Diagnostic:
    return Diagnostic("error", key, f"it has no effect with {SUPERVISED}: {what}", "remove it")


def reward_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find options that a registered reward does not take; warn where programs run in a reduced sandbox."""
    places = {f"rewards.{index}": section for index, section in enumerate(config.rewards)}
    for number, one in enumerate([] if config.validation is None else config.validation.sets):
        places |= {f"validation.sets.{number}.rewards.{index}": section for index, section in enumerate(one.rewards)}
    for place, section in places.items():
        key, reward = f"{place}.options", REWARDS.get(section.function)
        if isinstance(reward, type) and issubclass(reward, BaseModel):
            yield from model_diagnostics(reward, section.options, key)
        if section.function == "code" and section.options.get("sandbox") == "reduced":
            message = "sandbox=reduced lets programs that the model writes read every file that you can read"
            yield Diagnostic("warning", f"{key}.sandbox", message, "set it to full if this machine's kernel allows it")

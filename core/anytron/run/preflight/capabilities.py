"""Check that the engines can do what a run asks of them. Imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anytron.base.errors import ConfigError
from anytron.config.diagnostics import Diagnostic
from anytron.config.generation import RolloutSection
from anytron.config.options import chosen_engines
from anytron.task.data.model_files import composite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.base.components import Capability
    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform

OF_PROCESSES = ("replicas", "num_threads", "python", "weights", "lora", "placement", "max_staleness")
"""Keys of section ``rollout`` that configure rollout processes."""

ROUNDING = 0.01
"""Mean change of a token's log-prob, in nats, by ``rollout.quantization=fp8`` (docs/how-to/quantize-rollouts.md)."""


def training_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find capabilities that the run needs and its engines do not declare."""
    if config.critic is not None:
        fix = "set engine.name=megatron, or remove the section critic and set algorithm.advantage=grpo"
        yield from _lacking(config, "engine", "critic", "critic", "train a critic", fix)
    if config.teacher is not None:
        yield from _lacking(config, "engine", "teacher", "teacher", "score with a teacher", "set engine.name=megatron")
    if config.reward_model is not None:
        info = chosen_engines(config.engine.name, config.rollout.engine).get("engine.options")
        if info is not None and info.reward_model is None:
            message = f"the engine {config.engine.name} cannot score with a reward model"
            fix = "set engine.name=megatron, or remove the section reward_model and the reward reward_model"
            yield Diagnostic("error", "reward_model", message, fix)
    for key, directory in _directories(config).items():
        if _holds_others(directory):
            what, fix = "read the language model of a directory that holds other models too", "set engine.name=megatron"
            yield from _lacking(config, "engine", "language_part", key, what, fix)
    if config.model.lora is not None:
        yield from _lacking(config, "engine", "adapters", "model.lora", "train adapters", "remove model.lora")
    if config.engine.offload:
        yield from _lacking(config, "engine", "offload", "engine.offload", "free memory", "set engine.offload=[]")
    if config.rollout.sleep:
        yield from _lacking(config, "rollout", "sleep", "rollout.sleep", "free memory", "set rollout.sleep=false")
    yield from _generation(config)
    if config.resume != "never":
        yield from _lacking(config, "engine", "checkpoints", "resume", "continue from a checkpoint", "set resume=never")
    elif config.checkpoint.keep > 0:
        fix = "set checkpoint.keep=0 to accept that a run that dies starts over"
        yield from _lacking(config, "engine", "checkpoints", "checkpoint", "save checkpoints", fix, severity="warning")


def _directories(config: RunConfig) -> dict[str, Path]:
    """Return the model directories that the training ranks read, by their keys."""
    sections = {"model": config.model, "critic": config.critic, "teacher": config.teacher}
    paths = {name: getattr(section, "path", None) for name, section in sections.items()}
    return {f"{name}.path": Path(path) for name, path in paths.items() if path is not None}


def _holds_others(directory: Path) -> bool:
    try:
        return composite(directory) is not None
    except ConfigError:
        return False  # reported by itself


def _generation(config: RunConfig) -> Iterator[Diagnostic]:
    if config.rollout.lora == "alone":
        yield from _adapters_alone(config)
    if config.rollout.replay_routing:
        key, fix = "rollout.replay_routing", "remove rollout.replay_routing, or set"
        yield from _lacking(
            config, "rollout", "routing", key, "report its routing", f"{fix} rollout.engine=transformers"
        )
        yield from _lacking(
            config, "engine", "routing", key, "replay the rollout's routing", f"{fix} engine.name=megatron"
        )
    if config.rollout.quantization is not None:
        yield from _quantized(config)
    if config.engine.on_policy == "bitwise" and not config.supervised:
        key, fix = "engine.on_policy", "set engine.on_policy=close"
        what = "give the log-probs of training to the bit"
        yield from _lacking(config, "rollout", "bitwise", key, what, f"set rollout.engine=megatron, or {fix}")
        yield from _lacking(config, "engine", "bitwise", key, what, fix)


def _adapters_alone(config: RunConfig) -> Iterator[Diagnostic]:
    key, fix = "rollout.lora", "set rollout.lora=merged"
    if config.model.lora is None:
        yield Diagnostic("error", key, "there are no adapters to send: model.lora is not set", fix)
    yield from _lacking(config, "rollout", "adapters", key, "generate with adapters", fix)
    for other in ("check_weights_every", "sleep"):
        if getattr(config.rollout, other):
            message = "it needs all weights, and rollout.lora=alone sends adapters only"
            yield Diagnostic("error", f"rollout.{other}", message, f"remove rollout.{other}, or {fix}")


def _quantized(config: RunConfig) -> Iterator[Diagnostic]:
    key, remove = "rollout.quantization", "remove rollout.quantization"
    fix = f"{remove}, or set rollout.engine=transformers"
    yield from _lacking(config, "rollout", "quantization", key, "round its weights", fix)
    if config.rollout.lora == "alone":
        message = "no test compares adapters that are sent alone with merged ones if the other weights are rounded"
        yield Diagnostic("error", key, message, f"{remove}, or set rollout.lora=merged")
    if config.engine.on_policy == "bitwise":
        message = "rounded weights give other log-probs than training's"
        yield Diagnostic("error", key, message, f"{remove}, or set engine.on_policy=close")
    if config.rollout.check_weights_every:
        message = "it compares the rollout's weights with training's bit for bit, and rollout.quantization rounds them"
        yield Diagnostic("error", "rollout.check_weights_every", message, f"set it to 0, or {remove}")
    tolerance = config.trainer.rollout_log_prob_tolerance
    if tolerance is not None and tolerance < ROUNDING:
        message = (
            f"{tolerance:g} is less than what rollout.quantization changes: rounding weights to 8 bits moves the "
            f"log-prob of a token by about {ROUNDING:g} on average, and the run would stop"
        )
        fix = f"set trainer.rollout_log_prob_tolerance to 0.1, or remove it, or {remove}"
        yield Diagnostic("error", "trainer.rollout_log_prob_tolerance", message, fix)


def generates_in_training(config: RunConfig) -> bool:
    """Whether the training ranks themselves generate, with the weights that they hold."""
    info = chosen_engines(config.engine.name, config.rollout.engine).get("rollout.options")
    return info is not None and bool(info.part_of)


def rollout_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find a rollout engine that is a part of another training engine, and settings of processes that do not exist."""
    info, rollout = chosen_engines(config.engine.name, config.rollout.engine).get("rollout.options"), config.rollout
    if info is None or not info.part_of:
        return
    if info.part_of != config.engine.name:
        yield Diagnostic(
            "error",
            "rollout.engine",
            f"the rollout engine {rollout.engine} is a part of the training engine {info.part_of}, but engine.name is "
            f"{config.engine.name}",
            f"set rollout.engine=transformers, or engine.name={info.part_of}",
        )
    for name in OF_PROCESSES:
        if (value := getattr(rollout, name)) != (default := RolloutSection.model_fields[name].default):
            message = f"it is {value}, but with rollout.engine={rollout.engine} the training ranks generate, and "
            message += "the run has no rollout processes, which this key configures"
            yield Diagnostic("error", f"rollout.{name}", message, f"remove rollout.{name} (default: {default})")


def weight_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find why weights cannot be streamed or compared although the configuration requires it."""
    obstacle = why_a_file(config)
    if config.rollout.weights in ("shared_memory", "network") and obstacle is not None:
        yield Diagnostic("error", "rollout.weights", obstacle, "set rollout.weights=auto")
    if config.rollout.check_weights_every > 0:
        key = "rollout.check_weights_every"
        yield from _lacking(config, "rollout", "comparison", key, "compare its weights", f"set {key}=0")


def why_a_file(config: RunConfig) -> str | None:
    """Return why the rollout engine can take weights only from a file; None if it can also take a stream."""
    info = chosen_engines(config.engine.name, config.rollout.engine).get("rollout.options")
    if info is not None and not info.takes_stream:
        return f"the engine {config.rollout.engine} loads weights only from a file"
    return None


def platform_diagnostics(config: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Find what the engines cannot do on the active platform, as far as that is known before they are built."""
    for info in chosen_engines(config.engine.name, config.rollout.engine).values():
        check = info.load_platform_check()
        if check is not None:
            yield from check(config, platform)


def compares_weights(config: RunConfig) -> bool:
    """Whether the rollout engine can compare its weights with weights that it receives."""
    info = chosen_engines(config.engine.name, config.rollout.engine).get("rollout.options")
    return info is not None and "comparison" in info.capabilities


def shows_gradients(config: RunConfig) -> bool:
    """Whether the training engine returns the gradient of each parameter."""
    info = chosen_engines(config.engine.name, config.rollout.engine).get("engine.options")
    return info is not None and "gradients" in info.capabilities


def saves_checkpoints(config: RunConfig) -> bool:
    """Whether a run writes checkpoints: ``checkpoint.keep`` is not 0, and its training engine supports them."""
    return config.checkpoint.keep > 0 and can_save_checkpoints(config)


def can_save_checkpoints(config: RunConfig) -> bool:
    """Whether the training engine of a run can write checkpoints, whatever ``checkpoint.keep`` is."""
    info = chosen_engines(config.engine.name, config.rollout.engine).get("engine.options")
    return info is not None and "checkpoints" in info.capabilities


def verification_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find engines that ``anytron verify`` cannot compare with a reference, because they do not return logits."""
    fix = "train without anytron verify"
    yield from _lacking(config, "engine", "observation", "engine.name", "return its logits", fix)
    fix = f"verify with rollout.engine=transformers, or {fix}"
    yield from _lacking(config, "rollout", "observation", "rollout.engine", "return its logits", fix)


def replay_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find a training engine in which ``anytron replay`` cannot locate the first non-finite value."""
    fix = "use an engine that can, and that supports the model: set engine.name=NAME engine.options={}"
    yield from _lacking(config, "engine", "inspection", "engine.name", "inspect an update", fix)


def comparison_diagnostics(config: RunConfig) -> Iterator[Diagnostic]:
    """Find why ``anytron compare`` has nothing to compare, or a training engine that it cannot look into."""
    if config.supervised:
        message = "the run has no rollout whose bits could be compared with training's"
        yield Diagnostic("error", "algorithm.name", message, "compare a run of reinforcement learning")
    fix = "use an engine that can: set engine.name=megatron engine.options={}"
    yield from _lacking(config, "engine", "tracing", "engine.name", "trace its modules", fix)


def _lacking(
    config: RunConfig,
    section: str,
    capability: Capability,
    key: str,
    what: str,
    fix: str,
    severity: Literal["error", "warning"] = "error",
) -> Iterator[Diagnostic]:
    info = chosen_engines(config.engine.name, config.rollout.engine).get(f"{section}.options")
    if info is not None and capability not in info.capabilities:
        name = config.engine.name if section == "engine" else config.rollout.engine
        yield Diagnostic(severity, key, f"the engine {name} cannot {what}: it lacks the capability {capability}", fix)

"""Find features that a platform lacks: ``Platform.limits`` names them, or a plugin refuses a configuration."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import AnytronError, ConfigError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.config.diagnostics import Diagnostic, refuse
from anytron.config.schema import default_run
from anytron.device.platform import Feature, declined, features_asked, limits_of
from anytron.task.data.model_files import has_experts, stated_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.device.hooks.facade import Hooks
    from anytron.device.loading import Session
    from anytron.device.platform import Platform

VALUES: Mapping[Feature, tuple[str, Any]] = MappingProxyType(
    {
        Feature.THD: ("engine.sequence_format", "thd"),
        Feature.BSHD: ("engine.sequence_format", "bshd"),
        Feature.BFLOAT16: ("model.dtype", "bfloat16"),
        Feature.RECOMPUTE: ("engine.recompute", "full"),
        Feature.COMPANY_INVARIANCE: ("engine.on_policy", "bitwise"),
    }
)
"""Features that a run needs if a key has a certain value: the key and the value."""
SIZES: Mapping[Feature, str] = MappingProxyType(
    {
        Feature.TENSOR_PARALLEL: "parallel.tensor_model_parallel_size",
        Feature.PIPELINE_PARALLEL: "parallel.pipeline_model_parallel_size",
        Feature.CONTEXT_PARALLEL: "parallel.context_parallel_size",
        Feature.EXPERT_PARALLEL: "parallel.expert_model_parallel_size",
    }
)
"""Features that a run needs if a parallel size is above 1: the key of the size."""
WITHOUT: Mapping[Feature, tuple[tuple[str, Any], ...]] = MappingProxyType(
    {
        Feature.INTERLEAVED_PIPELINE: (("engine.options.virtual_pipeline_model_parallel_size", 1),),
        Feature.ROUTER_REPLAY: (("rollout.replay_routing", False), ("engine.options.router_replay", "off")),
        Feature.MULTI_TOKEN_PREDICTION: (("engine.options.mtp_loss_coefficient", 0.0),),
        Feature.ADAPTERS: (("model.lora", None),),
        Feature.CRITIC: (("critic", None),),
    }
)
"""Features that a run needs unless all these keys have these values; an engine option that is not set needs none."""


def limit_diagnostics(config: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Find features that a run needs and that the platform lacks according to ``Platform.limits``.

    Raises:
        HookContractError: The platform's ``limits()`` returned something other than limits.
    """
    messages = declined(platform, Feature)
    asked = list({**_asked_by_configuration(config), **asked_by_model(config)}.items()) if messages else []
    if messages and config.reward_model is not None:
        asked += _asked_by_reward_model(config)
    for feature, key in asked:
        if feature in messages:
            yield Diagnostic("error", key, messages[feature], f"change {key}, or use another platform")


def declared_limits(platform: Platform, hooks: Hooks) -> dict[Feature, str]:
    """Return the features that the platform lacks, each with the reason.

    For each feature that a key of the configuration selects, the hook ``configure`` is called with a small
    configuration: an error at this key, or an edit that sets another value, declares that the feature is lacking.

    Raises:
        HookContractError: The platform's ``limits()`` returned something other than limits.
    """
    found = limits_of(platform)
    for feature, (key, value) in {**VALUES, **{feature: (key, 2) for feature, key in SIZES.items()}}.items():
        if feature not in found and (reason := _refusal(hooks, key, value)):
            found[feature] = reason
    return found


def adapted(wanted: RunConfig, session: Session, key: str, value: Callable[[RunConfig], object]) -> RunConfig:
    """Let the plugins edit a configuration that is made to try a feature, and return the edited configuration.

    Args:
        wanted: The configuration.
        session: The plugins and the active platform.
        key: The key or section that is tried; empty = several.
        value: Function that reads from a configuration the value that edits must not change.

    Raises:
        NotPossible: A plugin finds an error, edits change the value, or the platform lacks a feature.
    """
    try:
        config, edits, _ = session.hooks.configure(wanted)
        refuse(limit_diagnostics(config, session.platform))
    except ConfigError as error:
        raise NotPossible(error.why or error.what) from error
    if value(config) != value(wanted):
        concerned = [(plugin, edit) for plugin, edit in edits if f"{edit.key}.".startswith(f"{key}.")]
        raise NotPossible(
            "; ".join(
                f"{plugin} sets {edit.key} to {edit.value!r}: {edit.reason}" for plugin, edit in concerned or edits
            )
        )
    return config


class NotPossible(Exception):  # noqa: N818 - what happened
    """The platform or a plugin refuses a configuration, or a plugin's edits change the value that was asked for."""


def _asked_by_configuration(config: RunConfig) -> dict[Feature, str]:
    found = {feature: key for feature, (key, value) in VALUES.items() if _value(config, key) == value}
    found |= {feature: key for feature, key in SIZES.items() if _value(config, key) > 1}
    return found | {
        feature: key
        for feature, keys in WITHOUT.items()
        for key, nothing in keys
        if _value(config, key, nothing) != nothing
    }


def _asked_by_reward_model(config: RunConfig) -> list[tuple[Feature, str]]:
    """Find the features that the reward model's parallel sizes and Hugging Face config need, with the key of each."""
    own = config.of_reward_model
    found = [(feature, f"reward_model.{key}") for feature, key in SIZES.items() if _value(own, key) > 1]
    return found + [(feature, "reward_model.path") for feature in asked_by_model(own)]


def _value(config: RunConfig, key: str, default: Any = None) -> Any:
    """Read a key; return ``default`` for an engine option that is not set."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, default) if isinstance(value, dict) else getattr(value, name)
    return value


def asked_by_model(config: RunConfig) -> dict[Feature, str]:
    """Find the features that a run's model needs, and the configuration key that names the model.

    The features follow from the model's Hugging Face config. If the config is missing or malformed, the result is
    empty, and other checks report the error.
    """
    key = "model.config" if config.model.path is None else "model.path"
    whole = stated_config(config.model.path, config.model.config)
    if not whole:
        return {}
    text: Mapping[str, Any] = whole.get("text_config") or whole
    layers = text.get("layer_types") or ()
    sliding = text.get("use_sliding_window") or "sliding_attention" in layers
    traits = ModelTraits(
        vision="vision_config" in whole,
        latent_attention=bool(text.get("kv_lora_rank")),
        linear_attention="linear_attention" in layers,
        mixture_of_experts=has_experts(text),
        window=(-1, 0) if sliding else None,
    )
    asked = features_asked(traits, ParallelSizes())
    if text.get("model_type") == "gpt_oss":
        asked.append(Feature.ATTENTION_SINKS)
    return dict.fromkeys(asked, key)


def _refusal(hooks: Hooks, key: str, value: Any) -> str:
    section, _, name = key.partition(".")
    asked = {section: {name: value}}
    if name == "expert_model_parallel_size":
        asked[section]["tensor_model_parallel_size"] = value
    try:
        edits, diagnostics = hooks.remarks(default_run(asked))
    except AnytronError:  # a rule of its own says what is wrong with the hook
        return ""
    for _, edit in edits:
        if edit.key == key and edit.value != value:
            return edit.reason
    return next((one.message for one in diagnostics if one.severity == "error" and one.key == key), "")

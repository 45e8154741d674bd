"""Refuse settings that the rollout engine ``transformers`` does not support. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import has_experts, stated_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron.device.platform import Platform

RECORDED = (
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "gpt_oss", "hy_v3",
    "minimax_m2", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe",
    "qwen3_vl_moe",
)  # fmt: skip
"""Values of ``model_type`` for which the engine can record the routing; a test compares it with Megatron's."""
SAME_EXPERTS = (
    "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "hy_v3", "minimax_m2", "olmoe", "qwen2_moe", "qwen3_moe"
)  # fmt: skip
"""Values of ``model_type`` of language models with experts whose log-probs can be training's to the bit: those of
:data:`anytron_rollout.invariant_experts.ROUTERS`."""

_ELSEWHERE = "rollout.engine=megatron, or engine.on_policy=close"


def diagnostics(config: RunConfig, platform: Platform) -> Iterator[Diagnostic]:
    """Refuse to record a routing, or to be equal to the bit, where the engine cannot; on any platform."""
    del platform
    fields = stated_config(config.model.path, config.model.config)
    if not fields:
        return
    if config.rollout.replay_routing and fields.get("model_type") not in RECORDED:
        message = f"the engine transformers cannot record the routing of {fields.get('model_type')}"
        yield Diagnostic(
            "error", "rollout.replay_routing", message, f"remove it (supported types: {', '.join(RECORDED)})"
        )
    if config.engine.on_policy == "bitwise":
        for why, fix in _differences(config, fields.get("text_config") or fields):
            yield Diagnostic("error", "engine.on_policy", why, fix)


def _differences(config: RunConfig, text: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each reason why log-probs would differ from training's, with its remedy."""
    kind = text.get("model_type")
    if has_experts(text) and kind not in SAME_EXPERTS:
        why = f"there is no form of a {kind}'s experts that computes in Megatron's order, as there is for "
        yield f"{why}{', '.join(SAME_EXPERTS)}", f"set {_ELSEWHERE}"
    if kind == "ernie4_5" and config.model.dtype != "float32":
        why = "transformers rotates the heads of an ernie4_5 in float32, and Megatron in the model's type"
        yield why, f"set model.dtype=float32, {_ELSEWHERE}"
    sizes, split = config.parallel.sizes(), "training adds up the parts of {} ranks, and a rollout process has no parts"
    if sizes.tensor > 1:
        yield split.format("tensor-parallel"), f"set parallel.tensor_model_parallel_size=1, {_ELSEWHERE}"
    elif sizes.expert_tensor > 1:
        yield split.format("expert-tensor-parallel"), f"set parallel.expert_tensor_parallel_size=1, {_ELSEWHERE}"

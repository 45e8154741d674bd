"""Count a model's computation per token from its tensors and config (``EngineInfo.flops``). Imports no Megatron."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytron.workers.engines.estimates import AttentionLayers, ModelFlops
from anytron_megatron.checks.subject import Subject
from anytron_megatron.estimate.tensors import TOWERS, chosen_share, kind_of, model_shapes
from anytron_megatron.options import MegatronOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.models.weight_names import Shapes

_NO_PRODUCT = frozenset({"conv1d", "A_log", "dt_bias", "sinks", "e_score_correction_bias"})
"""Tensors that are not multiplied with hidden states as matrices."""


def model_flops(run: RunConfig) -> tuple[ModelFlops, ModelFlops | None]:
    """Count the computation of the policy and of the critic (None = no critic), without their vision towers.

    Raises:
        ConfigError: The tensors of a model are not known before it is built.
    """
    ahead = MegatronOptions.of(run).mtp_loss_coefficient > 0
    subject = Subject.policy(run)
    policy = replace(_of(subject, predicts_ahead=ahead), trained=run.model.lora is None)
    if run.critic is None:
        return policy, None
    own = _of(Subject.critic(run) or subject, predicts_ahead=False, head=False)
    return policy, own


def _of(subject: Subject, *, predicts_ahead: bool, head: bool = True) -> ModelFlops:
    shapes, config = model_shapes(subject, predicts_ahead=predicts_ahead), subject.text
    return ModelFlops(weights_of_a_token(shapes, config, head=head), tuple(_attention(config)))


def weights_of_a_token(shapes: Shapes, config: Mapping[str, Any], *, head: bool) -> float:
    """Count the elements of all matrices with which the hidden state of a token is multiplied.

    Args:
        shapes: All parameters of the model.
        config: The Hugging Face config of the language model.
        head: Whether to count the output layer; False for a critic, whose head has one row and is not counted.
    """
    chosen = chosen_share(config)
    total = 0.0
    for name, shape in shapes.items():
        kind = kind_of(name)
        matrix = len(shape) > 1 and not name.endswith(".bias") and kind not in _NO_PRODUCT
        if not matrix or TOWERS.search(name) or kind in ("embed_tokens", "lm_head"):
            continue
        total += math.prod(shape) * (chosen if ".experts." in name else 1.0)
    return total + (config["vocab_size"] * config["hidden_size"] if head else 0)


def _attention(config: Mapping[str, Any]) -> Iterator[AttentionLayers]:
    """Collect layers with attention by their window; latent attention has keys and values of different sizes."""
    heads = config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        size = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]) / 2
    else:
        size = config.get("head_dim") or config["hidden_size"] / heads
    kinds = list(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])
    if not config.get("layer_types") and (every := config.get("full_attention_interval")):
        kinds = ["full" if (number + 1) % every == 0 else "linear" for number in range(len(kinds))]
    windowed = sum("sliding" in kind for kind in kinds)
    whole = sum("sliding" not in kind and "linear" not in kind for kind in kinds)
    if whole:
        yield AttentionLayers(whole * heads * size)
    if windowed:
        yield AttentionLayers(windowed * heads * size, config.get("sliding_window"))

"""What Megatron would refuse after minutes, or compute wrongly, of a mixture of experts. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.options import MegatronOptions

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names of the number of experts in Hugging Face configs (as mcore_bridge/config/parser.py reads them)."""

_EXPERT = "parallel.expert_model_parallel_size"
_EXPERT_TENSOR = "parallel.expert_tensor_parallel_size"
_REPLAY = "engine.options.router_replay"
_BALANCING = "engine.options.transformer.moe_router_load_balancing_type"


class BalancingMistake(NamedTuple):
    """Why a load-balancing loss cannot be used, and what to do."""

    why: str
    fix: str


def balancing_mistake(kind: str, sequence_format: str) -> BalancingMistake | None:
    """Judge a load-balancing loss that has a coefficient above 0.

    Args:
        kind: Megatron's ``moe_router_load_balancing_type``.
        sequence_format: ``thd`` or ``bshd``.
    """
    if kind == "seq_aux_loss" and sequence_format == "thd":
        return BalancingMistake(
            "it balances each sequence, and Megatron takes a packed micro-batch for one sequence",
            f"set {_BALANCING}=aux_loss, or engine.sequence_format=bshd",
        )
    if kind == "global_aux_loss":
        return BalancingMistake(
            "it adds up token counts over an update in the order of the micro-batches, each with those before it, "
            "so that its value depends on their order, and waits for all copies in each of them",
            f"set {_BALANCING}=aux_loss",
        )
    if kind == "sinkhorn":
        return BalancingMistake(
            "sinkhorn routing has no auxiliary loss",
            "set engine.options.transformer.moe_aux_loss_coeff=0, or another type",
        )
    return None


def expert_diagnostics(config: RunConfig, options: MegatronOptions, model: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Hold expert parallelism, auxiliary losses and router replay against a model.

    Args:
        config: The run.
        options: Options of the engine ``megatron``; the defaults for another one.
        model: The Hugging Face config of the language model; empty if there is none.
    """
    if not model:
        return
    experts = _number_of_experts(config, options, model)
    if experts:
        yield from _sizes(config, model, experts)
        yield from _balancing(config, options)
    else:
        yield from _dense(config, options)


def _number_of_experts(config: RunConfig, options: MegatronOptions, model: Mapping[str, Any]) -> int:
    """How many experts a layer has; 0 for a dense model."""
    given = next((model[name] for name in EXPERTS if model.get(name)), 0)
    concerned = config.parallel.sizes().expert > 1 or options.replays_routing
    if given or not concerned or config.model.path is not None:
        return int(given)
    # A config that is written by hand may leave the number to the default of its class.
    from anytron.data.pretrained import load_hf_config

    complete = load_hf_config(config.model).get_text_config()
    return int(next((getattr(complete, name) for name in EXPERTS if getattr(complete, name, None)), 0))


def _dense(config: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    if config.parallel.expert_model_parallel_size > 1:
        yield Diagnostic("error", _EXPERT, "the model has no experts to share out", "leave it out")
    if options.replays_routing:
        yield Diagnostic("error", _REPLAY, "the model has no experts, hence no routing", "leave it out")


def _sizes(config: RunConfig, model: Mapping[str, Any], experts: int) -> Iterator[Diagnostic]:
    sizes, world = config.parallel.sizes(), config.parallel.world_size
    if experts % sizes.expert:
        yield Diagnostic(
            "error",
            _EXPERT,
            f"{experts} experts cannot be shared out over {sizes.expert} ranks",
            f"use a size that divides {experts}",
        )
    # megatron/core/parallel_state.py, initialize_model_parallel
    needed = sizes.expert_tensor * sizes.expert * sizes.pipeline
    if world % needed:
        yield Diagnostic(
            "error",
            _EXPERT,
            f"{world} ranks are not a multiple of expert tensor {sizes.expert_tensor} x expert {sizes.expert} x "
            f"pipeline {sizes.pipeline} = {needed}",
            f"lower it or {_EXPERT_TENSOR}, or raise parallel.data_parallel_size",
        )
    elif sizes.expert == 1 and sizes.expert_tensor != sizes.tensor:
        yield Diagnostic(
            "error",
            _EXPERT_TENSOR,
            f"with parallel.expert_model_parallel_size=1 Megatron sums the gradients of experts over data-parallel "
            f"ranks only: experts on {sizes.expert_tensor} ranks in a model on {sizes.tensor} get wrong ones",
            f"leave it out, or share the experts out with {_EXPERT} above 1",
        )
    hidden = model.get("moe_intermediate_size")
    if hidden and hidden % sizes.expert_tensor:
        yield Diagnostic(
            "error",
            _EXPERT_TENSOR,
            f"moe_intermediate_size {hidden} cannot be split over {sizes.expert_tensor} ranks",
            f"use a size that divides {hidden}",
        )
    if sizes.tensor > 1 and not sizes.sequence_parallel:
        # megatron/core/transformer/moe/moe_layer.py, MoELayer.forward
        yield Diagnostic(
            "error",
            "parallel.sequence_parallel",
            "Megatron trains experts with tensor parallelism only together with sequence parallelism",
            "leave it out",
        )


def _balancing(config: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    fields, replay = options.transformer, options.replays_routing
    kinds = fields.get("moe_router_load_balancing_type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    coefficients = fields.get("moe_aux_loss_coeff", 0.0)
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    for kind, coefficient in zip(kinds, coefficients, strict=False):
        mistake = balancing_mistake(kind, config.engine.sequence_format) if coefficient else None
        if mistake:
            yield Diagnostic("error", _BALANCING, f"{kind}: {mistake.why}", mistake.fix)
    if replay and "sinkhorn" in kinds:
        yield Diagnostic("error", _REPLAY, "sinkhorn routing cannot be replayed", "leave it out")
    if replay and fields.get("moe_router_fusion"):
        yield Diagnostic(
            "error",
            _REPLAY,
            "Megatron's fused router asks nobody which experts to take",
            "set engine.options.transformer.moe_router_fusion=false",
        )

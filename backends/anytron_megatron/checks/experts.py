"""Check that Megatron can train a mixture of experts in this run. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.diagnostics import Diagnostic
from anytron.task.data.model_files import EXPERT_COUNTS
from anytron_megatron.lora.names import matches
from anytron_megatron.models.families import family_of, proved

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions

_EXPERT = "parallel.expert_model_parallel_size"
_EXPERT_TENSOR = "parallel.expert_tensor_parallel_size"
_REPLAY, _ROLLOUT_REPLAY = "engine.options.router_replay", "rollout.replay_routing"
_BALANCING = "engine.options.transformer.moe_router_load_balancing_type"
_CAPACITY = "engine.options.transformer.moe_expert_capacity_factor"
_COEFFICIENT = "engine.options.transformer.moe_aux_loss_coeff"


def balancing_diagnostics(coefficients: Mapping[str, float], sequence_format: str) -> Iterator[Diagnostic]:
    """Check load-balancing losses.

    Args:
        coefficients: Coefficient of each loss (``moe_aux_loss_coeff``) by its type
            (``moe_router_load_balancing_type``).
        sequence_format: ``thd`` or ``bshd``.
    """
    used = {kind for kind, coefficient in coefficients.items() if coefficient}
    if "seq_aux_loss" in used and sequence_format == "thd":
        yield Diagnostic(
            "error",
            _BALANCING,
            "seq_aux_loss cannot be used with packed sequences: it balances each sequence, but Megatron treats a "
            "packed micro-batch as one sequence",
            f"set {_BALANCING}=aux_loss, or engine.sequence_format=bshd",
        )
    if "global_aux_loss" in used:
        yield Diagnostic(
            "error",
            _BALANCING,
            "global_aux_loss is not supported: it adds up token counts over an update, so its value depends on the "
            "order of micro-batches, and it synchronizes all data-parallel replicas in each micro-batch",
            f"set {_BALANCING}=aux_loss",
        )
    if "sinkhorn" in used:
        yield Diagnostic(
            "error",
            _BALANCING,
            "sinkhorn routing has no auxiliary loss, so its coefficient must be 0",
            f"set {_COEFFICIENT}=0, or choose another type",
        )


def expert_diagnostics(subject: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check expert parallelism and load-balancing losses."""
    if not subject.config:
        return
    if experts := _number_of_experts(subject, run, options):
        yield from _sizes(subject, run, experts)
        yield from _adapters(run)
        yield from balancing_diagnostics(_coefficients(options), run.engine.sequence_format)
        if "quantile_balancing" in _listed(options.transformer.get("moe_router_load_balancing_type")):
            message = "quantile_balancing is not supported: it counts padding, and Megatron cannot exclude it"
            yield Diagnostic("error", _BALANCING, message, f"set {_BALANCING}=aux_loss")
    elif run.parallel.expert_model_parallel_size > 1:
        yield Diagnostic("error", _EXPERT, "the model has no experts to split over ranks", f"remove {_EXPERT}")


def routing_replay_diagnostics(policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that the routing of the policy can be replayed, if the run replays it."""
    replay = options.replay(run)
    if replay == "off" or not policy.config:
        return
    key = _ROLLOUT_REPLAY if replay == "rollout" else _REPLAY
    if not _number_of_experts(policy, run, options):
        yield Diagnostic("error", key, "the model has no experts, hence no routing", f"remove {key}")
        return
    if replay == "rollout":
        yield from _rollout_routing(policy, options)
    if "sinkhorn" in _listed(options.transformer.get("moe_router_load_balancing_type")):
        yield Diagnostic("error", key, "sinkhorn routing cannot be replayed", f"remove {key}")
    if options.transformer.get("moe_router_fusion"):
        message = "routing cannot be replayed with Megatron's fused router, which always chooses the experts itself"
        yield Diagnostic("error", key, message, "set engine.options.transformer.moe_router_fusion=false")


def _rollout_routing(policy: Subject, options: MegatronOptions) -> Iterator[Diagnostic]:
    if options.router_replay != "off":
        message = "rollout.replay_routing=true already replays the rollout's routing in all passes"
        yield Diagnostic("error", _REPLAY, message, f"remove {_REPLAY}")
    family = family_of(policy.config)
    if family is None or "replay" not in family.proof:
        model_type = policy.config.get("model_type")
        message = f"the routing of {model_type} cannot be replayed: no test compares it with Hugging Face"
        fix = f"remove {_ROLLOUT_REPLAY} (tested types: {proved('replay')})"
        yield Diagnostic("error", _ROLLOUT_REPLAY, message, fix)
    if options.transformer.get("moe_expert_capacity_factor") is not None:
        message = "Megatron drops tokens that exceed an expert's capacity, but rollout engines do not"
        yield Diagnostic("error", _ROLLOUT_REPLAY, message, f"remove {_CAPACITY}")


def _coefficients(options: MegatronOptions) -> dict[str, float]:
    kinds = _listed(options.transformer.get("moe_router_load_balancing_type"))
    coefficients = _listed(options.transformer.get("moe_aux_loss_coeff", 0.0))
    return dict(zip(kinds, coefficients, strict=False))


def _listed(value: Any) -> list[Any]:
    """Megatron takes one value, or a list of several; None = the option is not set."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _number_of_experts(subject: Subject, run: RunConfig, options: MegatronOptions) -> int:
    """Return how many experts a layer has; 0 for a dense model."""
    given = next((subject.text[name] for name in EXPERT_COUNTS if subject.text.get(name)), 0)
    needed = run.parallel.sizes().expert > 1 or options.replay(run) != "off"
    if given or not needed or subject.path is not None:
        return int(given)
    # A config that is written by hand may leave the number to the default of its class.
    from anytron.task.data.pretrained import load_hf_config

    complete = load_hf_config(run.model).get_text_config()
    return int(next((getattr(complete, name) for name in EXPERT_COUNTS if getattr(complete, name, None)), 0))


def _adapters(run: RunConfig) -> Iterator[Diagnostic]:
    ranks, lora = run.parallel.sizes().expert_tensor, run.model.lora
    paths = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
    if ranks > 1 and lora is not None and any(matches(path, target) for path in paths for target in lora.targets):
        yield Diagnostic(
            "error",
            _EXPERT_TENSOR,
            f"mcore-bridge cannot split adapters of experts over {ranks} tensor-parallel ranks",
            f"set {_EXPERT_TENSOR}=1 and distribute the experts with {_EXPERT}, or remove the experts from "
            "model.lora.targets",
        )


def _sizes(subject: Subject, run: RunConfig, experts: int) -> Iterator[Diagnostic]:
    sizes, world = run.parallel.sizes(), run.parallel.world_size
    if experts % sizes.expert:
        yield Diagnostic(
            "error",
            _EXPERT,
            f"{experts} experts cannot be split over {sizes.expert} ranks",
            f"use a size that divides {experts}",
        )
    # megatron/core/parallel_state.py, initialize_model_parallel
    needed = sizes.expert_tensor * sizes.expert * sizes.pipeline
    if world % needed:
        yield Diagnostic(
            "error",
            _EXPERT,
            f"the number of ranks, {world}, is not a multiple of {needed}: expert-tensor size {sizes.expert_tensor} x "
            f"expert size {sizes.expert} x pipeline size {sizes.pipeline}",
            f"lower {_EXPERT} or {_EXPERT_TENSOR}, or raise parallel.data_parallel_size",
        )
    elif sizes.expert == 1 and sizes.expert_tensor != sizes.tensor:
        yield Diagnostic(
            "error",
            _EXPERT_TENSOR,
            f"with parallel.expert_model_parallel_size=1 Megatron sums the gradients of experts over data-parallel "
            f"ranks only: experts split over {sizes.expert_tensor} ranks in a model split over {sizes.tensor} would "
            "get wrong gradients",
            f"remove {_EXPERT_TENSOR}, or set {_EXPERT} above 1",
        )
    hidden = subject.text.get("moe_intermediate_size")
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
            "remove parallel.sequence_parallel: the default follows the tensor-parallel size",
        )

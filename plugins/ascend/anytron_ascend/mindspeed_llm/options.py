"""``engine.options`` of the engine ``mindspeed_llm``, and the estimate of its memory. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from anytron import ConfigError, Section
from anytron.engines import Component, EngineInfo

if TYPE_CHECKING:
    from anytron import RunConfig
    from anytron.engines import TrainingEstimate


class ModelOptions(Section):
    """Options of models, in addition to the contents of their ``config.json``."""

    fused_rotary_embedding: bool = True
    """Rotate with the kernel that MindSpeed compiles with CANN at the first use (``use_fused_rotary_pos_emb``)."""
    fused_swiglu: bool = True
    """Use the kernel ``npu_swiglu`` (``use_fused_swiglu``)."""
    fused_rms_norm: bool = True
    """Use the kernel ``npu_rms_norm`` (``use_fused_rmsnorm``)."""
    softmax_in_fp32: bool = True
    """Compute softmax in float32 outside of the fused attention (``attention_softmax_in_fp32``)."""


class ParallelOptions(Section):
    """Options of communication between ranks, in addition to the sizes in ``parallel``."""

    ascend_mc2: bool = False
    """Overlap matrix products with the communication of tensor parallelism (``use_ascend_mc2``)."""


class OptimizerOptions(Section):
    """Options of the optimizer, in addition to ``optimizer`` and ``engine.distributed_optimizer``."""

    adam: Literal["fused_adamw", "fused_torch_adamw"] = "fused_adamw"
    """Implementation of AdamW that MindSpeed uses (``optimizer_selection``)."""


class RecomputeOptions(Section):
    """Options of recomputation, in addition to ``engine.recompute``."""

    method: Literal["uniform", "block"] = "uniform"
    """With ``engine.recompute=full``: ``uniform`` = all layers, in groups; ``block`` = the first layers of each
    pipeline stage (``recompute_method``)."""
    num_layers: int = Field(1, ge=1)
    """Layers in a group (``uniform``), or recomputed layers of a stage (``block``) (``recompute_num_layers``)."""
    activation_function: bool = False
    """Recompute activation functions alone, without ``engine.recompute`` (``recompute_activation_function``)."""


class MoeOptions(Section):
    """Options of models with a mixture of experts."""

    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"  # noqa: S105 - no password
    """How tokens reach experts (``moe_token_dispatcher_type``)."""
    grouped_gemm: bool = True
    """One grouped matrix product for the experts of a rank, which needs bfloat16; if false, one product after the
    other (``moe_grouped_gemm``)."""
    fused_permutation: bool = False
    """Use the kernel ``npu_moe_token_permute`` and its inverse (``use_fused_moe_token_permute_and_unpermute``)."""
    aux_loss_coefficient: float = Field(0.0, ge=0.0)
    """Weight of the load-balancing loss; 0 = none, as is usual in reinforcement learning (``moe_aux_loss_coeff``)."""


class MindSpeedLlmOptions(Section):
    """Options of the engine ``mindspeed_llm``; unknown keys are errors."""

    model: ModelOptions = ModelOptions()
    parallel: ParallelOptions = ParallelOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    recompute: RecomputeOptions = RecomputeOptions()
    moe: MoeOptions = MoeOptions()
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of MindSpeed-LLM, by its name with underscores. Unknown names are errors, and so are
    arguments that follow from other keys of the configuration."""


MINDSPEED_LLM = EngineInfo(
    engine="anytron_ascend.mindspeed_llm.engine:MindSpeedLlmEngine",
    options_model=MindSpeedLlmOptions,
    capabilities=frozenset({"critic", "checkpoints", "observation"}),
    components=(
        Component("megatron-core", "megatron.core"),
        Component("mindspeed", "mindspeed"),
        Component("mindspeed-llm", "mindspeed_llm"),
    ),
    memory="anytron_ascend.mindspeed_llm.options:estimate",
)


def estimate(run: RunConfig) -> TrainingEstimate:
    """Estimate the memory as for the engine ``megatron``: tensors, split, gradients, optimizer and log-probs are equal.

    Raises:
        ConfigError: ``engine.options.recompute`` keeps other activations than the engine ``megatron`` would; or the
            tensors of the model are not known before it is built.
    """
    from anytron_megatron import estimate_training

    section = MindSpeedLlmOptions.model_validate(run.engine.options).recompute
    defaults = type(section)()
    if others := [name for name in type(section).model_fields if getattr(section, name) != getattr(defaults, name)]:
        raise ConfigError(
            "The memory of this run cannot be estimated.",
            where=", ".join(f"engine.options.recompute.{name}" for name in others),
            why="the activations that these options keep cannot be counted",
            fix="remove these options for the estimate: with them, the run needs less memory than with "
            "engine.recompute=none, and usually more than with engine.recompute=full",
        )
    return estimate_training(run)

"""Describe the engine ``megatron`` without importing Megatron: its options and capabilities."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from anytron.base.components import Component, EngineInfo
from anytron.base.metric import Metric
from anytron.config.section import Section

if TYPE_CHECKING:
    from anytron.base.traits import ParallelSizes
    from anytron.config.schema import RunConfig


ENGINE = "megatron"
"""The name of the engine and of its plugin."""

RoutingReplay = Literal["off", "old-log-probs", "rollout"]
"""The pass whose routing is replayed in updates; ``off`` = updates route anew."""


class MegatronOptions(Section):
    """Options of the engine ``megatron``."""

    virtual_pipeline_model_parallel_size: int = Field(1, ge=1)
    """Number of model chunks on each pipeline rank; above 1, the schedule is interleaved and has smaller bubbles."""
    router_replay: Literal["off", "old-log-probs"] = "off"
    """For mixtures of experts: with ``old-log-probs``, updates send each token to the experts that were chosen in the
    pass that computes old log-probs (this pass is then always made). So probability ratios compare one network with
    itself."""
    mtp_loss_coefficient: float = Field(0.0, ge=0.0)
    """Train the model's multi-token prediction modules (DeepSeek-V3's ``num_nextn_predict_layers``) on the responses:
    weight of their cross entropy, added to the policy's loss; 0.1 is usual. 0 = the modules are saved unchanged and
    cost nothing."""
    mtp_detach: bool = True
    """Whether the loss of the multi-token prediction modules trains these modules only; false = it trains the policy
    too, as in pretraining."""
    overlap_grad_reduce: bool = False
    """Whether to reduce gradients over data-parallel ranks during the last micro-batch's backward pass, bucket by
    bucket, instead of after it."""
    ddp_bucket_size: int | None = Field(None, ge=1)
    """Number of parameters in a bucket of ``overlap_grad_reduce``, whose gradients are reduced together; the default is
    Megatron's: 40 million, or 1 million for each data-parallel rank if that is more."""
    share_prompts: bool = True
    """Whether to compute a prompt once for all of its samples in a micro-batch, where that saves a tenth of the tokens
    or more. This has an effect only with packed sequences (``engine.sequence_format: thd``) of dense text models with
    attention in every layer, in portable modules, without context parallelism and without training of multi-token
    prediction; other runs compute each sequence whole."""
    transformer: dict[str, Any] = Field(default_factory=dict)
    """Fields to override in Megatron's transformer config or among the fields that mcore-bridge adds to it."""

    @classmethod
    def of(cls, config: RunConfig) -> MegatronOptions:
        """Return the options of a run; the defaults if the run has another engine."""
        return cls.model_validate(config.engine.options) if config.engine.name == ENGINE else cls()

    @property
    def of_reward_model(self) -> MegatronOptions:
        """The options that apply to a reward model, which is not trained and has one pipeline chunk on each rank."""
        return type(self)(share_prompts=self.share_prompts, transformer=self.transformer)

    def replay(self, config: RunConfig) -> RoutingReplay:
        """Return the pass whose routing updates replay: scoring or the rollout; ``off`` = updates replay no routing."""
        return "rollout" if config.rollout.replay_routing else self.router_replay

    def sizes(self, config: RunConfig) -> ParallelSizes:
        """Return the run's parallel sizes, with ``virtual_pipeline`` from these options (1 on one pipeline rank)."""
        sizes = config.parallel.sizes()
        chunks = self.virtual_pipeline_model_parallel_size if sizes.pipeline > 1 else 1
        return replace(sizes, virtual_pipeline=chunks)


# Dataclasses and their files, by top-level package.
_COMMON = (
    ("megatron", "core/model_parallel_config.py", "ModelParallelConfig"),
    ("megatron", "core/transformer/transformer_config.py", "TransformerConfig"),
    ("mcore_bridge", "config/model_config.py", "ModelConfig"),
)

_LATENT = (
    ("megatron", "core/transformer/transformer_config.py", "MLATransformerConfig"),
    ("mcore_bridge", "config/model_config.py", "MLAModelConfig"),
)


@functools.cache
def transformer_fields(*, latent_attention: bool) -> frozenset[str]:
    """Collect the names of the fields of Megatron's transformer config, with the fields that mcore-bridge adds.

    The classes' source files are parsed, because importing them takes seconds and changes other libraries.

    Args:
        latent_attention: Whether to include the fields of multi-latent attention.
    """
    sources = [*_COMMON, *(_LATENT if latent_attention else ())]
    return frozenset().union(*(_fields(*source) for source in sources))


def _fields(package: str, file: str, name: str) -> set[str]:
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return set()
    # A namespace package may lie in several folders.
    path = next(path for place in spec.submodule_search_locations if (path := Path(place) / file).is_file())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _place_of(name: str) -> str | None:
    """Return the key of a field of Megatron's transformer config, ``transformer.NAME``; None for any other name."""
    return f"transformer.{name}" if name in transformer_fields(latent_attention=True) else None


_EXPERTS = "the coefficient of that loss is set ([experts](../how-to/train-mixture-of-experts.md))"

METRICS = (
    Metric("moe/load_balancing_loss", "", "load-balancing loss, mean over layers, 1 = perfect balance", _EXPERTS),
    Metric("moe/seq_load_balancing_loss", "", "load-balancing loss of each sequence, mean over layers", _EXPERTS),
    Metric("moe/z_loss", "", "z-loss of the routers, mean over layers", _EXPERTS),
    Metric(
        "moe/rerouted_fraction",
        "fraction",
        "tokens that predict a response token and whose router would have chosen other experts, mean over layers",
        "`engine.options.router_replay` or `rollout.replay_routing`",
    ),
    Metric(
        "mtp/loss",
        "nats",
        "loss of the multi-token prediction modules, mean over depths, without its coefficient",
        "`engine.options.mtp_loss_coefficient` is above 0",
    ),
    Metric("critic/moe/NAME", "", "the metrics `moe/NAME` of the critic's routers", "a critic with experts"),
)

IMPORTS = ("peft", "transformers.dynamic_module_utils", "transformers.models.auto")
"""Modules that patches of the phase ``before_parallel_init`` import, or that reading a model imports."""

MEGATRON = EngineInfo(
    engine="anytron_megatron.engine:MegatronEngine",
    options_model=MegatronOptions,
    capabilities=frozenset(
        {
            "critic",
            "teacher",
            "adapters",
            "checkpoints",
            "observation",
            "gradients",
            "inspection",
            "tracing",
            "offload",
            "routing",
            "language_part",
            "bitwise",
        }
    ),
    platform_check="anytron_megatron.checks.training:precision_diagnostics",
    metrics=METRICS,
    place_of=_place_of,
    components=(
        Component("megatron-core", "megatron.core"),
        Component("mcore-bridge", "mcore_bridge"),
        Component("peft", "peft"),
    ),
    memory="anytron_megatron.estimate.run:estimate",
    process_bytes=305 << 20,
    flops="anytron_megatron.estimate.flops:model_flops",
    proposal="anytron_megatron.checks.proposal:proposal",
    imports=IMPORTS,
    reward_model=EngineInfo(
        engine="anytron_megatron.reward_model:MegatronRewardModel",
        imports=IMPORTS,
        memory="anytron_megatron.estimate.run:estimate_reward_model",
        process_bytes=305 << 20,
    ),
)

MEGATRON_ROLLOUT = EngineInfo(
    engine=MEGATRON.engine,
    platform_check="anytron_megatron.checks.generation:platform_diagnostics",
    part_of=ENGINE,
    capabilities=frozenset({"bitwise"}),
    components=MEGATRON.components,
    memory="anytron_megatron.estimate.run:generation",
)

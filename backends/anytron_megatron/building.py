"""Build the models of one rank from Megatron modules, and the preparer of each model's inputs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from anytron.device.platform import EngineFacts, LayoutRequest, decisions_of, layout_constraints_of
from anytron.kernels.contract import LogProbSpec
from anytron.kernels.log_prob import TorchTiles, make_log_prob
from anytron_megatron.critic import Critic
from anytron_megatron.experts.experts import Experts
from anytron_megatron.models.source import AdapterSource, text_model
from anytron_megatron.options import MegatronOptions
from anytron_megatron.training import parallel
from anytron_megatron.training.heads import RewardHead, TokenScoreHead, take_cap
from anytron_megatron.training.micro_batch import BatchPreparer
from anytron_megatron.training.schedule import FrozenModel, ModelChunk
from anytron_megatron.training.vendor_attention import set_mask_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from anytron.base.traits import ModelTraits, ParallelSizes
    from anytron.device.runtime import DeviceRuntime
    from anytron.sequences.layout import Format, LayoutConstraints
    from anytron.sequences.masks import AttnMask
    from anytron.workers.engines.context import EngineContext
    from anytron_megatron.lora.adapters import Adapters
    from anytron_megatron.models.bridge import BridgeSource
    from anytron_megatron.models.source import ModelSource


def prepare_platform(context: EngineContext, sizes: ParallelSizes) -> None:
    """Let the platform set the process-wide state that depends on the run, before process groups exist."""
    facts = EngineFacts(sizes, deterministic=context.config.engine.repeatable)
    context.stack.prepare(facts)
    context.stack.hooks.invariant = context.config.engine.on_policy == "bitwise"


def join_ranks(context: EngineContext, sizes: ParallelSizes) -> DeviceRuntime:
    """Connect this rank with the others of its group; return its device."""
    config = context.config
    return parallel.join(
        context.stack,
        sizes,
        seed=config.trainer.seed,
        timeout_s=config.executor.call_timeout_s,
        init_method=context.init_method,
    )


def rank_facts(context: EngineContext, runtime: DeviceRuntime, mask: AttnMask) -> dict[str, Any]:
    """Describe a rank for the run's records: its device, attention mask, kernels and patches.

    Args:
        context: Context of the engine.
        runtime: Device of the rank.
        mask: The mask that the platform chose when the engine was built.
    """
    return {
        "rank": torch.distributed.get_rank(),
        "device": runtime.device_name(),
        "decisions": [asdict(decision) for decision in decisions_of(context.stack.platform)],
        "peak_flops": asdict(context.stack.platform.peak_flops(context.config.model.dtype)),
        "attention_mask": {"kind": mask.kind.value, "mode": mask.kernel_mode},
        "kernels": context.stack.hooks.suppliers(),
        "kernel_descriptions": context.stack.hooks.kernel_descriptions(),
        "patches": context.stack.ledger.report(),
    }


class ModelBuilder:
    """Builds the policy, its reference, a teacher, the critic and a reward model, each from a :class:`ModelSource`.

    Args:
        context: Context of the engine: configuration and device stack.
        sizes: The parallel sizes; their process groups must exist.
        runtime: The device.
    """

    def __init__(self, context: EngineContext, sizes: ParallelSizes, runtime: DeviceRuntime) -> None:
        self._config = context.config
        self._hooks = context.stack.hooks
        self._platform = context.stack.platform
        self._portable = context.stack.platform.portable_modules
        self._sizes = sizes
        self._runtime = runtime

    def preparer(
        self,
        source: ModelSource,
        sequence_format: Format | None = None,
        constraints: LayoutConstraints | None = None,
    ) -> BatchPreparer:
        """Make the preparer that turns micro-batches into inputs of a source's model.

        Args:
            source: The model directory, opened.
            sequence_format: ``thd`` or ``bshd``; None = ``engine.sequence_format``.
            constraints: Constraints on the layout of sequences, in addition to those that follow from the model, the
                ranks and the platform; None = no others.
        """
        sequence_format = sequence_format or self._config.engine.sequence_format
        request = LayoutRequest(sequence_format, source.traits, self._sizes)
        own = layout_constraints_of(self._platform, request)
        return BatchPreparer(
            self._hooks,
            sequence_format=sequence_format,
            traits=source.traits,
            accepted=source.accepted_masks(sequence_format, portable=self._portable),
            sizes=self._sizes,
            shard=parallel.context_shard(),
            device=self._runtime.current_device(),
            context_length=source.context_length,
            portable=self._portable,
            vision=source.vision,
            fp8=source.fp8,
            constraints=own if constraints is None else own.merge(constraints),
            share_prompts=self._shares_prompts(source.traits, sequence_format),
        )

    def _shares_prompts(self, traits: ModelTraits, sequence_format: Format) -> bool:
        """Whether a prompt may be computed once for several samples.

        False for models with recurrent layers or experts, whose states or loads depend on how often a token occurs;
        with sparse attention, whose layers take no map of what a token may see; and with multi-token prediction, which
        needs tokens beyond the end of a shared prompt.
        """
        options = MegatronOptions.of(self._config)
        by_attention_alone = traits.causal and not (
            traits.vision
            or traits.linear_attention
            or traits.sparse_attention
            or traits.mixture_of_experts
            or options.mtp_loss_coefficient
        )
        packed_whole = sequence_format == "thd" and self._sizes.context == 1
        return options.share_prompts and by_attention_alone and packed_whole and self._portable

    def policy(self, source: ModelSource, preparer: BatchPreparer) -> list[ModelChunk]:
        """Build the policy as :meth:`language_model` does; check the targets of ``model.lora`` before weights are read.

        Raises:
            ConfigError: One of ``model.lora.targets`` matches no layer.
            EngineError: The weights do not match the model.
        """
        return self._scoring(source, self._modules(source, preparer, self._check_targets))

    def language_model(self, source: ModelSource, preparer: BatchPreparer) -> list[ModelChunk]:
        """Build a model whose output layer gives the log-prob and the entropy of each token.

        Raises:
            EngineError: The weights do not match the model.
        """
        return self._scoring(source, self._modules(source, preparer))

    def frozen(self, source: ModelSource) -> FrozenModel:
        """Build a model as :meth:`language_model` does, frozen and with its own preparer.

        Raises:
            EngineError: The weights do not match the model.
        """
        preparer = self.preparer(source)
        return FrozenModel(self.language_model(source, preparer), preparer)

    def reward_model(self, source: BridgeSource, preparer: BatchPreparer) -> FrozenModel:
        """Build a frozen model whose output layer gives one score per sequence.

        Raises:
            EngineError: The weights do not match the model.
        """
        padding = source.hf_config.get_text_config().pad_token_id
        chunks = [
            ModelChunk(module, RewardHead(module.output_layer, padding) if module.post_process else None)
            for module in self._modules(source, preparer)
        ]
        return FrozenModel(chunks, preparer)

    def _scoring(self, source: ModelSource, modules: Sequence[nn.Module]) -> list[ModelChunk]:
        spec = LogProbSpec(
            vocab_size=source.vocab_size,
            tensor_parallel=self._sizes.tensor,
            chunk_tokens=self._config.engine.log_prob_chunk_tokens,
            device_type=self._runtime.device_type,
            dtype=getattr(torch, self._config.model.dtype),
        )
        return [ModelChunk(module, self._head(module, spec) if module.post_process else None) for module in modules]

    def _head(self, module: nn.Module, spec: LogProbSpec) -> TokenScoreHead:
        model = text_model(module)
        cap = take_cap(model)
        # Platforms' kernels cap no logits.
        kernel = self._hooks.log_prob_kernel(spec) if cap is None else make_log_prob(spec, TorchTiles(cap))
        return TokenScoreHead(model.output_layer, kernel, cap)

    def adapters(self, source: ModelSource, modules: Sequence[nn.Module]) -> Adapters | None:
        """Attach LoRA adapters to a model and return them; None if the run trains no adapters."""
        lora = self._config.model.lora
        if lora is None:
            return None
        # Their layers need Transformer Engine's and mcore-bridge's, which not every source has.
        from anytron_megatron.lora.adapters import Adapters

        assert isinstance(source, AdapterSource)  # an engine without adapters is refused before
        return Adapters(source, modules, lora, seed=self._config.trainer.seed)

    def critic(self, source: ModelSource) -> Critic:
        """Build the critic of PPO.

        Raises:
            EngineError: The weights, or the value head in ``critic.path``, do not match the model.
        """
        preparer = self.preparer(source)
        modules = self._modules(source, preparer)
        experts = Experts(modules, source.experts_config, sequence_format=self._config.engine.sequence_format)
        return Critic(modules, preparer, self._config, source, experts)

    def _modules(
        self,
        source: ModelSource,
        preparer: BatchPreparer,
        check: Callable[[list[nn.Module]], object] | None = None,
    ) -> list[nn.Module]:
        modules = source.build(self._runtime.current_device(), check)
        if not self._portable and source.attention_heads is not None:
            set_mask_type(modules, preparer.mask_kind, self._config.engine.sequence_format)
        return modules

    def _check_targets(self, chunks: Sequence[nn.Module]) -> None:
        """Refuse ``model.lora.targets`` that no layer has, before weights are read."""
        lora = self._config.model.lora
        if lora is not None:
            from anytron_megatron.lora.adapters import find_targets

            find_targets(chunks, lora.targets)

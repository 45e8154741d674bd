"""Micro-batches as training engines make them with a platform's hooks, small ones first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.platform import Feature, LayoutRequest, layout_constraints_of
from anytron.kernels.contract import AttentionCall
from anytron.sequences import scopes
from anytron.sequences.layout import ContextShard, ModelInputs, SequenceLayout
from anytron.sequences.masks import MaskKind, MaskRequest, Polarity, scope_of
from anytron.sequences.planning import plan_layout
from anytron_conformance.rules import Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from anytron.sequences.layout import Format
    from anytron.sequences.masks import AttnMask
    from anytron.sequences.scopes import ScopeFactory
    from anytron_conformance.subject import Subject

LENGTHS: tuple[tuple[int, ...], ...] = ((1,), (2,), (1, 2), (3, 1, 2), (5, 1, 9, 3), (17, 16, 15, 1))
"""Real lengths that few alignments divide, and around a power of two; the smallest first."""
FORMATS: tuple[Format, ...] = ("thd", "bshd")
FEATURE = {"thd": Feature.THD, "bshd": Feature.BSHD}


@dataclass(frozen=True)
class Scene:
    """The inputs from which a micro-batch is made.

    Attributes:
        format: ``thd`` or ``bshd``.
        lengths: Real lengths.
        traits: Properties of the model that determine masks and layouts.
        tensor, context: Sizes of tensor and context parallelism.
    """

    format: Format
    lengths: tuple[int, ...]
    traits: ModelTraits = field(default_factory=ModelTraits)
    tensor: int = 1
    context: int = 1

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes."""
        return ParallelSizes(tensor=self.tensor, context=self.context, sequence_parallel=self.tensor > 1)

    @property
    def total(self) -> int:
        """Number of real tokens."""
        return sum(self.lengths)

    @property
    def accepted(self) -> frozenset[MaskKind]:
        """The kinds of mask that a language model's attention accepts in this scene."""
        if self.format == "thd" or self.context > 1:
            return frozenset({MaskKind.NONE})
        return frozenset({MaskKind.NONE, MaskKind.FULL_4D})

    @property
    def case(self) -> Case:
        """The scene as the case of a rule."""
        words = [self.format, f"lengths {' '.join(map(str, self.lengths))}"]
        needs = [FEATURE[self.format]]
        if not self.traits.causal:
            words.append("not causal")
        if self.traits.window is not None:
            words.append(f"window {self.traits.window}")
            needs.append(Feature.SLIDING_WINDOW)
        for has, feature in (
            (self.traits.mixture_of_experts, Feature.MIXTURE_OF_EXPERTS),
            (self.traits.linear_attention, Feature.LINEAR_ATTENTION),
        ):
            if has:
                words.append(feature.value)
                needs.append(feature)
        if self.tensor > 1:
            words.append(f"tensor parallel {self.tensor}")
            needs.append(Feature.TENSOR_PARALLEL)
        if self.context > 1:
            words.append(f"context parallel {self.context}")
            needs.append(Feature.CONTEXT_PARALLEL)
        return Case(", ".join(words), self, self.total * self.tensor * self.context, tuple(needs))


@dataclass(frozen=True)
class MicroBatch:
    """One rank's micro-batch, after the hooks.

    Attributes:
        given: Argument of ``preprocess_sequences``.
        inputs: Result of ``preprocess_sequences``.
        tokens: Ids of the real tokens, int64 ``[T]``, all different.
        mask: The platform's answer to ``build_attn_mask``.
    """

    given: ModelInputs
    inputs: ModelInputs
    tokens: Tensor
    mask: AttnMask

    @property
    def layout(self) -> SequenceLayout:
        """The layout, on the device."""
        return self.inputs.layout

    @property
    def scope(self) -> ScopeFactory | None:
        """Factory of the scope in which engines run the forward pass; None if there is no scope."""
        return scopes.combine(self.inputs.scope, scope_of(self.mask))

    def call(self, sinks: Tensor | None = None) -> AttentionCall:
        """The arguments of an attention kernel's call."""
        mode, plugin, layout = self.mask.kernel_mode, self.mask.plugin, self.layout
        if layout.format == "bshd":
            # Kernels read a full mask as True = MASKED, whichever way it was written.
            return AttentionCall("bshd", mode, mask=self.mask.read_as(Polarity.MASKED), sinks=sinks, mode_from=plugin)
        ends, starts, longest = layout.cu_seqlens, layout.cu_seqlens_padded, layout.max_seqlen
        return AttentionCall("thd", mode, ends, ends, starts, starts, longest, longest, sinks=sinks, mode_from=plugin)


def scenes(
    lengths: Iterable[tuple[int, ...]] = LENGTHS,
    traits: Iterable[ModelTraits] = (ModelTraits(),),
    parallel: Iterable[tuple[int, int]] = ((1, 1),),
) -> Iterator[Scene]:
    """Combine both formats with each of the given values; ``parallel`` is (tensor, context)."""
    parallel, traits = tuple(parallel), tuple(traits)
    for one in lengths:
        for trait in traits:
            for tensor, context in parallel:
                for sequence_format in FORMATS:
                    yield Scene(sequence_format, one, trait, tensor, context)


def planned_layout(subject: Subject, scene: Scene, shard: ContextShard | None = None) -> SequenceLayout:
    """Plan the layout of a rank with the platform's constraints, on the host."""
    constraints = layout_constraints_of(subject.platform, LayoutRequest(scene.format, scene.traits, scene.sizes))
    return plan_layout(
        scene.lengths,
        format=scene.format,
        tensor_parallel=scene.tensor,
        shard=shard or ContextShard(scene.context, 0),
        constraints=constraints,
    )


def micro_batch(
    subject: Subject, scene: Scene, *, rank: int = 0, group: ProcessGroup | None = None, padding: int = 0
) -> MicroBatch:
    """Send a micro-batch through ``layout_constraints``, ``preprocess_sequences`` and ``build_attn_mask``.

    Args:
        subject: The platform.
        scene: Inputs of the micro-batch.
        rank: Rank of the context-parallel shard.
        group: Process group over which values are gathered; None = nothing is gathered.
        padding: Value of the padding slots of the ids; engines use 0.
    """
    planned = planned_layout(subject, scene, ContextShard(scene.context, rank, group))
    tokens = torch.arange(100, 100 + scene.total)
    labels = planned.next_tokens(tokens).to(subject.device)
    layout, tokens = planned.to(subject.device), tokens.to(subject.device)
    given = ModelInputs(layout, layout.pack(tokens, padding), layout.position_ids, labels)
    inputs = subject.hooks.preprocess_sequences(given)
    request = MaskRequest(scene.format, scene.traits, scene.sizes, scene.accepted)
    built = subject.hooks.build_attn_mask(request)
    mask = subject.hooks.build_attn_mask(replace(request, layout=layout), built)
    return MicroBatch(given, inputs, tokens, mask)

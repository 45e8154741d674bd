"""Functions for custom trainers that train Megatron models on a device stack.

docs/how-to/use-in-your-own-trainer.md shows such a trainer. Open the device stack before you import this module,
because the module imports Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.platform import EngineFacts, Feature, LayoutRequest, features_asked, layout_constraints_of
from anytron.sequences import scopes
from anytron.sequences.masks import MaskKind
from anytron_megatron.training import parallel
from anytron_megatron.training.micro_batch import BatchPreparer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, device, nn

    from anytron.device.stack import DeviceStack
    from anytron.sequences.layout import Format, LayoutConstraints
    from anytron_megatron.training.micro_batch import PreparedBatch


def join(stack: DeviceStack, sizes: ParallelSizes | None = None, *, seed: int = 1, timeout_s: float = 600.0) -> device:
    """Prepare this rank for building models: the platform's state, patches, process groups, random generators.

    Args:
        stack: Device stack of this process.
        sizes: The parallel sizes; None = one rank. Ranks that ``torchrun`` has started use its rendezvous.
        seed: Seed of the random generators.
        timeout_s: Longest duration of a collective, in seconds; a longer one fails.

    Returns:
        The rank's device.
    """
    facts = EngineFacts(sizes or ParallelSizes())
    stack.prepare(facts)
    return parallel.join(stack, facts.sizes, seed=seed, timeout_s=timeout_s).current_device()


def batch_preparer(
    stack: DeviceStack,
    sequence_format: Format,
    *,
    context_length: int,
    traits: ModelTraits | None = None,
    sizes: ParallelSizes | None = None,
    accepted: frozenset[MaskKind] = frozenset({MaskKind.NONE}),
    constraints: LayoutConstraints | None = None,
    fp8: bool = False,
    asked: Iterable[Feature] = (),
) -> BatchPreparer:
    """Make the object that turns ragged sequences into inputs of a model, with the platform's layouts and masks.

    First the platform is asked whether it supports the format, the traits and the sizes.

    Args:
        stack: Device stack of this process, whose rank has joined.
        sequence_format: ``thd``, packed, or ``bshd``, padded.
        context_length: Longest sequence that the model can take, in tokens.
        traits: Traits of the model that decide its mask; None = the traits of a dense causal model.
        sizes: See :func:`join`.
        accepted: Kinds of mask that can reach the model's attention; ``NONE`` = causal attention without a mask tensor.
        constraints: Constraints on the layout in addition to the platform's; None = no others.
        fp8: Whether the model computes in FP8, whose kernels take whole blocks of tokens.
        asked: Further features that the model requires of the platform
            (:func:`anytron_megatron.models.configuration.features_of` reads them from a Megatron configuration).

    Raises:
        ConfigError: The platform lacks a feature that the model requires.
    """
    traits, sizes = traits or ModelTraits(), sizes or ParallelSizes()
    stack.require([Feature(sequence_format), *features_asked(traits, sizes), *asked])
    own = layout_constraints_of(stack.platform, LayoutRequest(sequence_format, traits, sizes))
    return BatchPreparer(
        stack.hooks,
        sequence_format=sequence_format,
        traits=traits,
        accepted=accepted,
        sizes=sizes,
        shard=parallel.context_shard(),
        device=stack.platform.runtime().current_device(),
        context_length=context_length,
        portable=stack.platform.portable_modules,
        fp8=fp8,
        constraints=own if constraints is None else own.merge(constraints),
    )


def forward(model: nn.Module, prepared: PreparedBatch) -> Tensor:
    """Run a model on a micro-batch inside ``prepared.scope()``, which recomputation enters again automatically.

    Returns:
        The model's output; on the last pipeline stage the logits, ``[R, C, V]``: R rows, C columns, and V entries of
        the vocabulary on this rank.
    """
    with scopes.enter(prepared.scope()):
        output: Tensor = model(**prepared.arguments())
    return output


def token_log_probs(logits: Tensor, batches: BatchPreparer, prepared: PreparedBatch) -> Tensor:
    """Compute the log-prob of the token after each token, for any layout and any split of the vocabulary.

    Args:
        logits: The result of :func:`forward`: R rows, C columns, and V entries of the vocabulary on this rank.
        batches: The preparer that made ``prepared``.
        prepared: The micro-batch.

    Returns:
        float32 ``[T]``, with gradient, without padding, gathered over context-parallel ranks; 0 where no generated
        token of the same sequence follows.
    """
    labels = prepared.inputs.labels
    # Megatron's cross-entropy has no ignored label, and may write over float32 logits that it is given.
    losses: Tensor = vocab_parallel_cross_entropy(logits.float().clone(), labels.clamp(min=0))
    return batches.postprocess((-losses).where(labels >= 0, 0.0), prepared)

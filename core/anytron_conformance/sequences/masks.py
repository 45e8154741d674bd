"""Rules about masks, checked by outputs of the platform's kernel and, for known kernel modes, by reading the mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.base.traits import ModelTraits
from anytron.kernels.contract import AttentionSpec
from anytron.kernels.oracles.masks import PADDING, defined_pairs, influence, read_transformer_engine, wrong_companion
from anytron.proof.checks import Inapplicable
from anytron.sequences import scopes
from anytron.sequences.layout import ContextShard
from anytron.sequences.masks import MaskRequest
from anytron_conformance.micro_batches import Scene, micro_batch, planned_layout, scenes
from anytron_conformance.rules import Broken, rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.sequences.masks import Pair
    from anytron_conformance.micro_batches import MicroBatch
    from anytron_conformance.rules import Case
    from anytron_conformance.subject import Subject


HEADS = (4, 2)
"""Number of query heads, and of key and value heads."""
SIZE = 16
SCALE = 0.3


def operands(total: int) -> list[Tensor]:
    """Queries, keys and values of all tokens, float32 ``[T, H, D]`` on the host."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(total, heads, SIZE, generator=generator) for heads in (HEADS[0], HEADS[1], HEADS[1])]


def attention_of(
    subject: Subject, batch: MicroBatch, traits: ModelTraits
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a layer's attention: the kernel, with the mask that the engine passes, in the scope of the micro-batch.

    It maps ``[R, C, H, D]`` to ``[R, C, H, Dv]``, with R rows of C tokens each.

    Raises:
        Inapplicable: The model's modules are a vendor's, which call their own attention.
    """
    if not subject.platform.portable_modules:
        raise Inapplicable(
            "the platform's modules are a vendor's, which call their own attention; the later levels check it"
        )
    spec = AttentionSpec(*HEADS, SIZE, SIZE, SCALE, traits, device_type=subject.runtime.device_type)
    kernel = subject.hooks.attention_kernel(spec)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with scopes.enter(batch.scope):
            if batch.layout.format == "thd":
                return kernel(query[0], key[0], value[0], batch.call())[None]
            return kernel(query, key, value, batch.call())

    return attend


CAUSAL, EVERYWHERE, WINDOW = ModelTraits(), ModelTraits(causal=False), ModelTraits(window=(1, 0))
TRAITS = (CAUSAL, EVERYWHERE, WINDOW)
LENGTHS = ((1,), (2,), (1, 2), (3, 1, 2), (5, 1, 9, 3))
NEUTRAL_WORDS = ("no_mask", "causal", "padding", "padding_causal", "arbitrary")


@rule(
    "mask-by-influence",
    "sequences",
    "A token's output depends on the tokens that the definition lets it see, and on no others.",
    cases=[scene.case for scene in scenes(LENGTHS, TRAITS)],
)
def mask_by_influence(subject: Subject, case: Case) -> None:
    """One key and its value are changed at a time, and the set of outputs that change is compared with the definition.

    The kernel gets the mode and the tensor that the engine would pass, in the scope of the micro-batch, so no mode has
    to be known by name. This finds faults of polarity, causality, windows, sequences that see each other, and padding.
    """
    scene: Scene = case.values
    batch = micro_batch(subject, scene)
    attend, layout = attention_of(subject, batch, scene.traits), batch.layout
    found = influence(attend, operands(scene.total), layout, subject.device)
    _compare(found, scene, f"in mode '{batch.mask.kernel_mode}' of plugin '{batch.mask.plugin}'")


@rule(
    "mask-is-read",
    "sequences",
    "A mask, read as its kernel's documentation says, lets through exactly the pairs of the definition.",
    cases=[scene.case for scene in scenes(LENGTHS, TRAITS, ((1, 1), (1, 2)))],
)
def mask_is_read(subject: Subject, case: Case) -> None:
    """The layouts of all context-parallel ranks and the mask are read pair by pair.

    The mask's own reader is used, or the kit's reader for modes of Transformer Engine. A mode that only the platform's
    own kernel knows is checked by the rule ``mask-by-influence`` alone.
    """
    scene: Scene = case.values
    shards = [ContextShard(scene.context, rank) for rank in range(scene.context)]
    layouts = [planned_layout(subject, scene, shard).to(subject.device) for shard in shards]
    if scene.context > 1 and scene.format == "bshd" and not scene.traits.causal:
        raise Inapplicable("with context-parallel padded rows and no causality, kernels cannot know what is padding")
    mask = subject.hooks.build_attn_mask(
        MaskRequest(scene.format, scene.traits, scene.sizes, scene.accepted, layouts[0])
    )
    if mask.reader is None and mask.kernel_mode not in NEUTRAL_WORDS:
        raise Inapplicable(f"the mode '{mask.kernel_mode}' has no reader: the rule mask-by-influence checks it")
    try:
        found = (mask.reader or read_transformer_engine)(mask, layouts, scene.traits)
    except ValueError as error:
        raise Broken("The kernel refuses the mask.", str(error)) from error
    _compare(found, scene, f"read in mode '{mask.kernel_mode}' of plugin '{mask.plugin}'")


@rule(
    "mask-companions",
    "sequences",
    "padding_mask marks the padding of this rank, and linear_attn_mask the real tokens of all ranks.",
    cases=[
        scene.case
        for scene in scenes(LENGTHS, (ModelTraits(mixture_of_experts=True), ModelTraits(linear_attention=True)))
    ],
)
def mask_companions(subject: Subject, case: Case) -> None:
    """``padding_mask`` (True = MASKED) and ``linear_attn_mask`` (True = KEEP) must match the layout.

    Padding that is routed takes capacity of an expert; padding that enters a recurrent state stays in it.
    """
    scene: Scene = case.values
    batch = micro_batch(subject, scene)
    wrong = wrong_companion(batch.mask, batch.layout, scene.traits)
    if wrong:
        maps = batch.mask.padding_mask, batch.mask.linear_attn_mask
        raise Broken(wrong, ", ".join(str(one.tolist()) for one in maps if one is not None))


@rule(
    "padding-without-influence",
    "sequences",
    "The contents of padding, even NaN in packed sequences, change no output of a real token and no gradient.",
    cases=[scene.case for scene in scenes(LENGTHS, (CAUSAL, WINDOW))],
)
def padding_without_influence(subject: Subject, case: Case) -> None:
    """The same tokens, with padding of 0, and of NaN (thd) or a large number (bshd), give the same results.

    Differences may not exceed rounding. Engines leave arbitrary numbers in padding.
    """
    scene: Scene = case.values
    batch = micro_batch(subject, scene)
    attend, layout = attention_of(subject, batch, scene.traits), batch.layout
    results = []
    for filling in (0.0, float("nan") if scene.format == "thd" else 1e4):
        leaves = [operand.to(subject.device).requires_grad_() for operand in operands(scene.total)]
        output = layout.unpack(attend(*(layout.pack(leaf, filling) for leaf in leaves)))
        if not output.requires_grad:
            raise Broken("The output of attention has no gradient.")
        gradients = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
        results.append([output.detach(), *gradients])
    names = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
    for name, clean, poisoned in zip(names, *results, strict=True):
        if clean is None or poisoned is None:
            raise Broken(f"The {name} is missing.")
        if not torch.allclose(clean, poisoned, rtol=1e-5, atol=1e-6):
            off = (clean - poisoned).abs().nan_to_num(float("inf")).max()
            raise Broken(f"The {name} depends on the contents of padding.", f"largest difference {float(off):.3g}")


def _compare(found: set[Pair], scene: Scene, how: str) -> None:
    expected = defined_pairs(scene.lengths, scene.traits)
    if found == expected:
        return
    query, key = min(found ^ expected)
    other = "padding" if key == PADDING else f"token {key}"
    seen = "sees" if (query, key) in found else "does not see"
    raise Broken(
        f"Token {query} {seen} {other}, {how}.",
        f"{len(found ^ expected)} wrong pairs of tokens; sequences begin at tokens {_starts(scene)}",
    )


def _starts(scene: Scene) -> str:
    return ", ".join(str(sum(scene.lengths[:place])) for place in range(len(scene.lengths)))

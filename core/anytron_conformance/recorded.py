"""Random trajectories for tiny models, with all that a loss reads: an off-policy loss on them is far from zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anytron.sequences.batch import RaggedBatch
from anytron.task.data.images import ImagePatches
from anytron_conformance.tiny_models import IMAGE_TOKEN, VISION_END, VISION_START

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LENGTHS = (5, 9, 7, 12, 3, 8, 16, 4)
PROMPT = 2
"""Tokens of each prompt."""
VOCABULARY = 97
"""All tokens are below this number. It is odd, so that a model of this vocabulary is padded on two tensor-parallel
ranks."""
GRIDS: tuple[tuple[tuple[int, int], ...], ...] = (
    (),
    ((4, 4),),
    ((2, 6), (6, 4)),
    ((4, 2),),
    (),
    ((6, 6),),
    ((2, 2), (4, 4)),
    ((2, 4),),
)
"""Height and width, in patches, of the images of each sequence of :func:`recorded_images`."""
PATCH_VALUES = 96
"""Numbers of a patch: 3 colours, 2 frames, 4 x 4 pixels."""


def recorded() -> RaggedBatch:
    """Return 8 sequences of random tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    return _batch(
        lengths,
        torch.full((len(LENGTHS),), PROMPT),
        torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator),
        generator,
        center=-4.6,
    )


def recorded_images() -> RaggedBatch:
    """Return 8 sequences with no, one or two images each, for the tiny vision-language models."""
    generator = torch.Generator().manual_seed(2)

    def text(count: int) -> list[int]:
        found: list[int] = torch.randint(3, IMAGE_TOKEN, (count,), generator=generator).tolist()
        return found

    tokens: list[int] = []
    prompts, lengths, images = [], [], []
    for index, grids in enumerate(GRIDS):
        sequence = text(index % 3)  # now and then an image comes first
        for height, width in grids:
            sequence += [VISION_START, *[IMAGE_TOKEN] * (height * width // 4), VISION_END, *text(2)]
        sequence += text(2)
        prompts.append(len(sequence))
        sequence += text(3 + index % 4)
        tokens += sequence
        lengths.append(len(sequence))
        images.append(_patches(grids, generator))
    return _batch(
        torch.tensor(lengths),
        torch.tensor(prompts),
        torch.tensor(tokens),
        generator,
        center=-4.85,
        images=tuple(images),
    )


def _patches(grids: Sequence[tuple[int, int]], generator: torch.Generator) -> ImagePatches | None:
    if not grids:
        return None
    count = sum(height * width for height, width in grids)
    pixels = torch.randn(count, PATCH_VALUES, generator=generator)
    return ImagePatches(pixels, torch.tensor([[1, *grid] for grid in grids]))


def _batch(
    lengths: Tensor,
    prompts: Tensor,
    tokens: Tensor,
    generator: torch.Generator,
    *,
    center: float,
    images: tuple[ImagePatches | None, ...] | None = None,
) -> RaggedBatch:
    """Make a batch: add the values that a loss reads to the tokens.

    Args:
        lengths: int64 ``[B]``.
        prompts: int64 ``[B]``, tokens of each prompt.
        tokens: int64 ``[T]``.
        generator: Draws the rest.
        center: Mean of the log-probs.
        images: As in the batch.
    """
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    response = positions >= prompts.repeat_interleave(lengths)

    def log_probs() -> Tensor:
        return (center + 0.3 * torch.randn(len(tokens), generator=generator)) * response

    return RaggedBatch(
        lengths=lengths,
        tokens=tokens,
        response_mask=response,
        rollout_log_probs=log_probs(),
        old_log_probs=log_probs(),
        reference_log_probs=log_probs(),
        advantages=torch.randn(len(lengths), generator=generator).repeat_interleave(lengths),
        loss_weights=response / response.sum(),
        token_shares=response / response.sum(),
        images=images,
    )

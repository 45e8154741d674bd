"""Arguments that images add to a model's call: patches and the three position axes of mrope, with checks.

They are for the vision-language models of the Qwen family. mcore-bridge calls these with ``pixel_values`` and
``image_grid_thw``, as Hugging Face does, and also with position ids, which Hugging Face's models compute
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.sequences.batch import RaggedBatch
    from anytron.sequences.layout import SequenceLayout
    from anytron.task.data.images import ImagePatches


@dataclass(frozen=True)
class VisionInputs:
    """How one model takes images.

    An image token that the model itself has drawn (in a response) counts as text, as in Hugging Face's ``generate``; no
    image belongs to it.

    Attributes:
        image_token: Token that occurs in the text once for each image embedding of the vision tower.
        video_token: The corresponding token for videos, which are refused.
        merge: The vision tower merges ``merge * merge`` patches into one embedding.
        patch_values: Number of values in one patch: D, the last dimension of ``pixel_values``.
    """

    image_token: int
    video_token: int
    merge: int
    patch_values: int

    @classmethod
    def from_config(cls, hf_config: Any) -> VisionInputs:
        """Read the token ids and sizes from the Hugging Face config of a model that takes images."""
        vision = hf_config.vision_config
        # mcore_bridge/model/mm_gpts/utils.py says in_channels where Qwen2-VL's own config has both names.
        return cls(
            image_token=hf_config.image_token_id,
            video_token=hf_config.video_token_id,
            merge=vision.spatial_merge_size,
            patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        )

    def image_map(self, batch: RaggedBatch) -> Tensor:
        """Mark the tokens that stand for images: bool ``[T]``, on the host."""
        return (batch.tokens == self.image_token) & ~batch.response_mask

    def position_ids(self, batch: RaggedBatch) -> Tensor:
        """Return the temporal, vertical and horizontal position of each token (mrope).

        Positions of text are equal on all three axes. An image of ``t x h x w`` merged patches that begins at position
        p takes ``p + (0..t-1, 0..h-1, 0..w-1)``, and the text after it continues at ``p + max(h, w)`` (Qwen2-VL, arXiv
        2409.12191, section 2.1; ``get_rope_index`` of transformers' qwen2_5_vl and qwen3_vl, which differ for videos
        only).

        Returns:
            int64 ``[3, T]``, on the host.

        Raises:
            DataError: Image tokens and patches do not match, or there are video tokens.
        """
        lengths = batch.lengths.tolist()
        images = batch.images or (None,) * len(lengths)
        sequences = zip(
            images, torch.split(batch.tokens, lengths), torch.split(batch.response_mask, lengths), strict=True
        )
        return torch.cat([self._positions(*sequence, index) for index, sequence in enumerate(sequences)], 1)

    def arguments(self, batch: RaggedBatch, layout: SequenceLayout, device: torch.device) -> dict[str, Tensor]:
        """Return the images as arguments of the model's forward.

        A micro-batch without images has no such arguments: the model then sends an image of zeros through its vision
        tower and adds 0 times the result, so that the same parameters take part on every rank.

        Returns:
            ``pixel_values`` ``[N, D]`` and ``image_grid_thw`` ``[I, 3]`` of all images in order, and
            ``mm_token_type_ids`` ``[R, C]``, in the layout ``layout.taken``: 1 for image tokens, 0 for others.
        """
        images = [patches for patches in batch.images or () if patches is not None]
        if not images:
            return {}
        return {
            "pixel_values": torch.cat([patches.pixel_values for patches in images]).to(device, non_blocking=True),
            "image_grid_thw": torch.cat([patches.grid_thw for patches in images]).to(device, non_blocking=True),
            "mm_token_type_ids": layout.taken.pack(self.image_map(batch).to(device, non_blocking=True).long()),
        }

    def _positions(self, images: ImagePatches | None, tokens: Tensor, response: Tensor, sequence: int) -> Tensor:
        prompt = ~response
        if bool(((tokens == self.video_token) & prompt).any()):
            raise DataError(
                "Videos are not supported.",
                where=f"sequence {sequence} of the micro-batch",
                why=f"its prompt has the video token {self.video_token}",
                fix="remove videos from the data, or replace them with images",
            )
        places = ((tokens == self.image_token) & prompt).nonzero().flatten()
        grids = [] if images is None else self._checked_grids(images, sequence)
        sizes = [t * h * w for t, h, w in grids]
        if sum(sizes) != places.numel():
            raise _misfit(sequence, f"it has {places.numel()} image tokens, but patches for {sum(sizes)}")
        axes, next_position, done = [], 0, 0
        for (t, h, w), own in zip(grids, torch.split(places, sizes), strict=True):
            begin, size = int(own[0]), own.numel()
            if int(own[-1]) - begin != size - 1:
                raise _misfit(sequence, f"the {size} tokens of an image are not contiguous")
            axes.append(_count_on(next_position, begin - done))
            next_position += begin - done
            axes.append(torch.cartesian_prod(*map(torch.arange, (t, h, w))).view(size, 3).t() + next_position)
            next_position += max(h, w)
            done = begin + size
        axes.append(_count_on(next_position, tokens.numel() - done))
        return torch.cat(axes, 1)

    def _checked_grids(self, images: ImagePatches, sequence: int) -> list[tuple[int, int, int]]:
        """The images' sizes after merging."""
        patches, values = images.pixel_values.shape
        grids = images.grid_thw.tolist()
        if values != self.patch_values:
            raise _misfit(sequence, f"its patches have {values} values each, but the model reads {self.patch_values}")
        if any(h % self.merge or w % self.merge or min(t, h, w) < 1 for t, h, w in grids):
            raise _misfit(sequence, f"its grids {grids} are not multiples of spatial_merge_size {self.merge}")
        counted = sum(t * h * w for t, h, w in grids)
        if counted != patches:
            raise _misfit(sequence, f"it has {patches} patches, but its grids {grids} are for {counted}")
        return [(t, h // self.merge, w // self.merge) for t, h, w in grids]


def refuse_images(batch: RaggedBatch) -> None:
    """Refuse images for a model that takes none.

    Raises:
        DataError: The micro-batch has images.
    """
    if any(images is not None for images in batch.images or ()):
        raise DataError(
            "This model does not accept images.",
            where="a micro-batch with images",
            why="images are supported for some model families only (docs/reference/families.md)",
            fix="use a model of one of these families, or data without images",
        )


def _count_on(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count).expand(3, -1)


def _misfit(sequence: int, why: str) -> DataError:
    return DataError(
        "The images of a sequence do not match its image tokens or the model.",
        where=f"sequence {sequence} of the micro-batch",
        why=why,
        fix="prepare prompts with the model's own processor, and do not truncate them",
    )

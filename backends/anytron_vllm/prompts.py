"""Prompts as vLLM's engine takes them: what its own renderer would make of them, made here of tokens and patches.

vLLM's renderer prepares images with the model's processor. They have been prepared already, for training and rollout
alike (:class:`anytron.task.data.images.ImagePatches`), and a second preparation might give others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.rollout_engine import PromptInputs


@dataclass(frozen=True)
class ImageTokens:
    """Where images are in the tokens of a model.

    Attributes:
        token: The image token's id.
        merge: Patches in a row, and in a column, that make one token.
    """

    token: int
    merge: int

    @classmethod
    def of(cls, hf_config: Any) -> ImageTokens | None:
        """Those of a model; None if it takes no images."""
        vision = getattr(hf_config, "vision_config", None)
        return None if vision is None else cls(int(hf_config.image_token_id), int(vision.spatial_merge_size))

    def places(self, tokens: tuple[int, ...], images: ImagePatches) -> list[tuple[int, int]]:
        """Find the first token of each image, and how many it has. Image tokens after those were drawn by the model."""
        found = [place for place, token in enumerate(tokens) if token == self.token]
        counts = (images.grid_thw.prod(-1) // self.merge**2).tolist()
        return [(found[start], count) for start, count in zip(accumulate(counts, initial=0), counts, strict=False)]


def engine_input(prompt: PromptInputs, image_tokens: ImageTokens | None) -> Any:
    """Make vLLM's ``EngineInput`` of a prompt."""
    from vllm.inputs import mm_input, tokens_input

    tokens, images = list(prompt.tokens), prompt.images
    if images is None:
        return tokens_input(tokens)
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    assert image_tokens is not None, "the core refuses images for a model without vision"
    sizes = images.grid_thw.prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    values = BatchFeature({"pixel_values": images.pixel_values, "image_grid_thw": images.grid_thw})
    items = MultiModalKwargsItems.from_hf_inputs(values, fields)
    each = zip(images.pixel_values.split(sizes.tolist()), images.grid_thw, strict=True)
    names = [_name(patches, grid) for patches, grid in each]
    places = [
        PlaceholderRange(offset=start, length=count) for start, count in image_tokens.places(prompt.tokens, images)
    ]
    return mm_input(tokens, items, {"image": names}, {"image": places})


def _name(patches: Tensor, grid: Tensor) -> str:
    """Name an image by what it shows: what vLLM has cached for the name, it takes for the image."""
    content = hashlib.sha256(patches.contiguous().numpy().tobytes())
    content.update(grid.numpy().tobytes())
    return content.hexdigest()

"""Requests in vLLM's form, and responses in progress.

vLLM's renderer prepares images with the model's processor. But they have been prepared already, once for training and
rollout (:class:`anytron.task.data.images.ImagePatches`), and a second preparation might give other patches. So this
module makes the renderer's output itself, from tokens and patches.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from anytron.workers.engines.rollout_engine import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, SamplingParams, StopReason


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a model.

    Attributes:
        token: The image token's id.
        merge: Side length, in patches, of the square of patches that makes one token.
    """

    token: int
    merge: int

    @classmethod
    def of(cls, hf_config: Any) -> ImageTokens | None:
        """Return the image tokens of a model; None if Anytron gives it no images."""
        vision = getattr(hf_config, "vision_config", None)
        merge = getattr(vision, "spatial_merge_size", None)
        return None if merge is None else cls(int(hf_config.image_token_id), int(merge))

    def places(self, tokens: tuple[int, ...], images: ImagePatches) -> list[tuple[int, int]]:
        """Return, for each image, the index of its first token and its number of tokens.

        Image tokens after the last image's tokens were drawn by the model.
        """
        found = [place for place, token in enumerate(tokens) if token == self.token]
        counts = (images.grid_thw.prod(-1) // self.merge**2).tolist()
        return [(found[start], count) for start, count in zip(accumulate(counts, initial=0), counts, strict=False)]


def engine_input(prompt: PromptInputs, image_tokens: ImageTokens | None) -> Any:
    """Convert a prompt to vLLM's ``EngineInput``."""
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
    """Name an image by a hash of its content: vLLM reuses what it has cached under a name."""
    content = hashlib.sha256(patches.contiguous().numpy().tobytes())
    content.update(grid.numpy().tobytes())
    return content.hexdigest()


def sampling_params(request: GenerationRequest) -> Any:
    """Convert a request to vLLM's ``SamplingParams``."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: SamplingParams = request.sampling
    return VllmSamplingParams(
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        temperature=1.0,  # logits are divided by the temperature before vLLM sees them
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.end_token_ids),
        ignore_eos=True,  # the end tokens are those of the request, not of the checkpoint
        logprobs=0,  # of the token that was drawn
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        seed=request.seed % 2**63,
    )


@dataclass(eq=False)
class UnderWay:
    """A request and its partial response.

    Attributes:
        request: The request as submitted.
        tokens: The tokens generated so far.
        log_probs: Log-prob of each token.
        versions: Version of the weights that generated each token.
        ended: Whether vLLM has ended the response.
        routing: The experts of its tokens, once it is over, if the run replays them (:mod:`anytron_vllm.routing`).
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = False
    routing: Tensor | None = None

    def extend(self, tokens: Sequence[int], log_probs: Sequence[float], version: int, *, ended: bool) -> None:
        """Append tokens that weights of one version generated."""
        self.tokens.extend(tokens)
        self.log_probs.extend(log_probs)
        self.versions.extend([version] * len(tokens))
        self.ended = ended

    def response(self, reason: StopReason) -> Response:
        """The response so far."""
        return Response(tuple(self.tokens), tuple(self.log_probs), reason, tuple(self.versions), self.routing)

"""Generate with a Hugging Face model: build it without weights, and answer requests that are sampled alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from anytron.task.data.pretrained import model_class, take_latent_epsilon
from anytron_rollout.sampling import TokenSampler
from anytron_rollout.shared_prompts import can_share, owners_of, read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import LogitsProcessor, StoppingCriteria

    from anytron.task.data.images import ImagePatches
    from anytron.workers.engines.rollout_engine import GenerationRequest, Response
    from anytron.workers.engines.sampling import StopStrings


def build_model(config: Any, dtype: torch.dtype, **arguments: Any) -> Any:
    """Build a model from its config alone; its weights are to be loaded.

    Args:
        config: A ``transformers.PretrainedConfig``.
        dtype: Element type of the parameters.
        arguments: Further ones of transformers' ``from_config``, for example ``attn_implementation``.

    Returns:
        A ``transformers.PreTrainedModel`` on the host.
    """
    model = model_class(config).from_config(config, dtype=dtype, **arguments)
    take_latent_epsilon(model)
    # The model's own sampling defaults (temperature, repetition penalty) must not take effect.
    model.generation_config = GenerationConfig()
    return model


@torch.inference_mode()
def generate(
    model: Any,
    requests: Sequence[GenerationRequest],
    version: int,
    *,
    device: torch.device,
    share_prompts: bool = True,
    stop: StopStrings | None = None,
    processors: Iterable[LogitsProcessor] = (),
    criteria: Iterable[StoppingCriteria] = (),
) -> list[Response]:
    """Answer requests that are sampled alike, in one batch.

    Args:
        model: A Hugging Face model.
        requests: At least one.
        version: Of the model's weights.
        device: On which the model reads its inputs.
        share_prompts: Read equal prompts once, where the model can.
        stop: Finds the requests' stop strings; None = there are none.
        processors: Change the logits before a token is drawn.
        criteria: End responses besides the requests' own limits.
    """
    sampling, prompts = requests[0].sampling, [request.prompt for request in requests]
    input_ids, attention_mask = _left_pad([prompt.tokens for prompt in prompts], sampling.pad_token_id)
    images = [prompt.images for prompt in prompts if prompt.images is not None]
    arguments: dict[str, Any] = image_arguments(model, images, input_ids, device) if images else {}
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    rows, owners = owners_of(prompts)
    if share_prompts and len(rows) < len(prompts) and input_ids.shape[1] > 1 and can_share(model):
        arguments["past_key_values"] = read_prompts(model, input_ids, attention_mask, rows, owners)
    sampler = TokenSampler(sampling, [request.seed for request in requests], prompt_width=input_ids.shape[1], stop=stop)
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        **arguments,
        # Our sampler does all of the sampling, end tokens included: this code could not tell in which
        # order transformers' own processors come.
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=sampling.max_new_tokens, pad_token_id=sampling.pad_token_id
        ),
        logits_processor=LogitsProcessorList([*processors, sampler]),
        stopping_criteria=StoppingCriteriaList([sampler.stopping, *criteria]),
    )
    return sampler.responses(output, version)


def image_arguments(
    model: Any, images: Sequence[ImagePatches], input_ids: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """Make the model's arguments for images, which are in the order of the rows that hold their tokens.

    ``mm_token_type_ids`` (0 = text, 1 = image) tells where mrope's positions are two-dimensional. Without it
    transformers takes image tokens for text, without an error.
    """
    arguments = {
        "pixel_values": torch.cat([patches.pixel_values for patches in images]),
        "image_grid_thw": torch.cat([patches.grid_thw for patches in images]),
        "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
    }
    return {name: value.to(device) for name, value in arguments.items()}


def _left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Arrange prompts of different lengths so that they all end in the last column.

    Returns:
        ``input_ids`` and ``attention_mask`` (1 = real token), both int64 ``[B, S]``.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    real = torch.arange(width) >= (width - lengths)[:, None]
    input_ids = torch.full((len(prompts), width), pad_token_id)
    input_ids[real] = torch.tensor([token for prompt in prompts for token in prompt])
    return input_ids, real.long()

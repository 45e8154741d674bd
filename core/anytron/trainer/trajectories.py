"""Turn generated responses into what rewards and training read."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from anytron.batch import RaggedBatch
from anytron.rewards.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.data.prompts import TokenizedPrompt
    from anytron.engines.protocol import Response


def make_samples(
    prompts: Sequence[TokenizedPrompt], responses: Sequence[Sequence[Response]], tokenizer: Any
) -> list[Sample]:
    """Join each prompt with its responses, decoded without special tokens.

    Args:
        prompts: P prompts.
        responses: G responses for each; later steps find the groups by that number.
        tokenizer: A Hugging Face tokenizer.

    Returns:
        ``P * G`` samples, those of one prompt side by side; they share its images.
    """
    pairs = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
    texts = tokenizer.batch_decode([list(response.tokens) for _, response in pairs], skip_special_tokens=True)
    return [
        Sample(
            prompt_id=prompt.id,
            prompt_text=prompt.text,
            response_text=text,
            prompt_tokens=prompt.tokens,
            response_tokens=response.tokens,
            log_probs=response.log_probs,
            finished=response.stop_reason == "stop",
            data=prompt.data,
            images=prompt.images,
            patches=prompt.patches,
        )
        for (prompt, response), text in zip(pairs, texts, strict=True)
    ]


def assemble(samples: Sequence[Sample], temperature: float) -> RaggedBatch:
    """Concatenate samples into a batch; a response may be empty.

    Args:
        samples: B samples.
        temperature: What they were sampled at.
    """
    prompt_lengths = torch.tensor([len(sample.prompt_tokens) for sample in samples])
    response_lengths = torch.tensor([len(sample.response_tokens) for sample in samples])
    lengths = prompt_lengths + response_lengths
    tokens = torch.tensor(
        list(chain.from_iterable(chain(sample.prompt_tokens, sample.response_tokens) for sample in samples)),
        dtype=torch.int64,
    )
    starts = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(tokens.numel()) - torch.repeat_interleave(starts, lengths)
    response_mask = position >= torch.repeat_interleave(prompt_lengths, lengths)
    rollout_log_probs = torch.zeros(tokens.numel())
    rollout_log_probs[response_mask] = torch.tensor(
        list(chain.from_iterable(sample.log_probs for sample in samples)), dtype=torch.float32
    )
    images = tuple(sample.patches for sample in samples)
    return RaggedBatch(
        lengths=lengths,
        tokens=tokens,
        response_mask=response_mask,
        temperature=temperature,
        rollout_log_probs=rollout_log_probs,
        images=images if any(patches is not None for patches in images) else None,
    )

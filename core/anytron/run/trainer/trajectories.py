"""Turn generated responses, and those that the data have, into what rewards and training read."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch

from anytron.sequences.batch import RaggedBatch
from anytron.task.data.thoughts import decode_responses, opened
from anytron.task.rewards.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from anytron.task.data.prompts import TokenizedPrompt
    from anytron.workers.engines.rollout_engine import Response

TAIL = 16
"""Tokens that a mark of thought has, and white space behind it, at most."""


def make_samples(
    prompts: Sequence[TokenizedPrompt], responses: Sequence[Sequence[Response]], tokenizer: Any
) -> list[Sample]:
    """Join each prompt with its responses, decoded (:func:`anytron.task.data.thoughts.decode_responses`).

    Args:
        prompts: P prompts.
        responses: One or more for each.
        tokenizer: A Hugging Face tokenizer.

    Returns:
        The samples, those of one prompt side by side; they share its images.
    """
    pairs = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
    texts = decode_responses(tokenizer, [response.tokens for _, response in pairs])
    return [
        Sample(
            prompt_id=prompt.id,
            prompt_text=prompt.text,
            response_text=text,
            prompt_tokens=prompt.tokens,
            response_tokens=response.tokens,
            log_probs=response.log_probs,
            finished=response.finished,
            data=prompt.data,
            images=prompt.images,
            patches=prompt.patches,
            response_mask=response.response_mask,
            environment=response.environment,
            routing=response.routing,
            opened=_opened(prompt, response, tokenizer),
        )
        for (prompt, response), text in zip(pairs, texts, strict=True)
    ]


def _opened(prompt: TokenizedPrompt, response: Response, tokenizer: Any) -> str:
    """What the model's last turn begins behind: at the end of the prompt, or of what the environment wrote last."""
    mask = response.response_mask
    if mask is None or all(mask):
        return opened(prompt.text)
    end = len(mask) - next((place for place, own in enumerate(reversed(mask)) if not own), 0)
    return opened(tokenizer.decode(list(response.tokens[max(0, end - TAIL) : end])))


def assemble(samples: Sequence[Sample], temperature: float, groups: Tensor | None = None) -> RaggedBatch:
    """Concatenate samples into a batch; a response may be empty.

    Args:
        samples: B samples.
        temperature: What they were sampled at.
        groups: int64 ``[B]``, the number of each sample's prompt (:attr:`RaggedBatch.groups`).
    """
    lengths = torch.tensor([len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples])
    tokens = chain.from_iterable(chain(sample.prompt_tokens, sample.response_tokens) for sample in samples)
    mask = chain.from_iterable(chain(repeat(False, len(sample.prompt_tokens)), _own(sample)) for sample in samples)
    log_probs = chain.from_iterable(
        chain(repeat(0.0, len(sample.prompt_tokens)), sample.log_probs) for sample in samples
    )
    images = tuple(sample.patches for sample in samples)
    return RaggedBatch(
        lengths=lengths,
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        response_mask=torch.tensor(list(mask), dtype=torch.bool),
        temperature=temperature,
        groups=groups,
        rollout_log_probs=torch.tensor(list(log_probs), dtype=torch.float32),
        routing=_joined_routing(samples),
        images=images if any(patches is not None for patches in images) else None,
    )


def assemble_examples(examples: Sequence[TokenizedPrompt]) -> RaggedBatch:
    """Concatenate examples of supervised fine-tuning into a batch.

    Args:
        examples: B prompts with their ``response_mask``.
    """
    tokens = chain.from_iterable(example.tokens for example in examples)
    mask = chain.from_iterable(example.response_mask or () for example in examples)
    images = tuple(example.patches for example in examples)
    return RaggedBatch(
        lengths=torch.tensor([len(example.tokens) for example in examples]),
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        response_mask=torch.tensor(list(mask), dtype=torch.bool),
        images=images if any(patches is not None for patches in images) else None,
    )


def _own(sample: Sample) -> Iterable[bool]:
    return repeat(True, len(sample.response_tokens)) if sample.response_mask is None else sample.response_mask


def _joined_routing(samples: Sequence[Sample]) -> Tensor | None:
    """Give a row to each token, if rollout engines tell routing.

    They have not told it of the token that ends a sequence, and of what was not generated from because an environment
    failed. Nothing is learnt from these: they go to the first experts.
    """
    known = next((sample.routing for sample in samples if sample.routing is not None), None)
    if known is None:
        return None
    first = torch.arange(known.shape[-1], dtype=known.dtype)
    rows = []
    for sample in samples:
        told = known[:0] if sample.routing is None else sample.routing
        untold = len(sample.prompt_tokens) + len(sample.response_tokens) - len(told)
        rows += [told, first.expand(untold, known.shape[1], -1)]
    return torch.cat(rows)

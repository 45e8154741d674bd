"""Read each prompt once, however many responses a batch makes to it.

Legend: B rows, P different prompts, S columns of the prompts.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.workers.engines.rollout_engine import PromptInputs

_ARGUMENTS = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values"})


def can_share(model: Any) -> bool:
    """Tell whether a model generates from a cache that it has been given, as it does from its own.

    That is so for models of text alone whose layers keep what they know in transformers' ``DynamicCache``. Those with
    images count positions by themselves, and some families have caches of their own.

    Args:
        model: A Hugging Face model.
    """
    config, decoder = model.config, model.get_decoder()
    return (
        not config.is_encoder_decoder
        and config.get_text_config() is config
        and model._supports_default_dynamic_cache()  # as generate decides; no public way to ask
        and decoder is not model
        and set(inspect.signature(decoder.forward).parameters) >= _ARGUMENTS
    )


def owners_of(prompts: Sequence[PromptInputs]) -> tuple[list[int], list[int]]:
    """Find the different prompts.

    Args:
        prompts: B prompts.

    Returns:
        The rows of the P different ones, where each occurs first; and which of the P each of the B rows has.
    """
    places: dict[tuple[int, ...], int] = {}
    rows: list[int] = []
    owners: list[int] = []
    for row, prompt in enumerate(prompts):
        place = places.setdefault(tuple(prompt.tokens), len(rows))
        if place == len(rows):
            rows.append(row)
        owners.append(place)
    return rows, owners


def read_prompts(
    model: Any, input_ids: Tensor, attention_mask: Tensor, rows: Sequence[int], owners: Sequence[int]
) -> DynamicCache:
    """Pass different prompts through a model without their last tokens, whose outputs ``generate`` itself needs.

    Args:
        model: One that :func:`can_share`.
        input_ids: int64 ``[B, S]``, padded to the left, S > 1.
        attention_mask: int64 ``[B, S]``, 1 = real token.
        rows: Of the P different prompts.
        owners: Which of the P each row has.

    Returns:
        The cache of B rows and S - 1 columns, for the argument ``past_key_values`` of ``generate``.
    """
    ids, mask = input_ids[list(rows), :-1], attention_mask[list(rows), :-1]
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # padding's too, as generate counts them
    model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    # Unlike batch_select_indices, beam search's way of choosing rows is known to recurrent layers as well.
    cache.reorder_cache(torch.LongTensor(owners))
    return cache

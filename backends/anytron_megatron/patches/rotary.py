"""Fixes of rotary embeddings: their kernel, their positions with a cache of keys, and transformers' table of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from anytron.kernels.contract import KernelName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def build_on_the_host(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``YarnRotaryEmbedding.__init__``: make the frequencies on the host if torch has no accelerator of its own.

    The first use moves them to the current device, as with ``use_cpu_initialization``.
    """
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N807 - becomes a constructor
        call = parameters.bind(*args, **kwargs)
        if torch.accelerator.current_accelerator() is None:
            call.arguments["use_cpu_initialization"] = True
        original(*call.args, **call.kwargs)

    return __init__


def rotate_by_kernel(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``_apply_rotary_pos_emb_bshd``: use the platform's kernel unless a scale is given.

    The fourth argument, ``multi_latent_attention``, is named ``mla_rotary_interleaved`` from 0.19 on.
    """
    # Not above: the other fixes here are also for platforms without the portable modules.
    from anytron_megatron.portable_te.binding import kernels

    rotate = kernels().fused(KernelName.ROPE, None)

    @functools.wraps(original)
    def _apply_rotary_pos_emb_bshd(
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        *,
        mla_rotary_interleaved: bool = False,
        **further: Any,
    ) -> Tensor:
        pairs = multi_latent_attention or mla_rotary_interleaved
        if mscale != 1.0 or further:
            return original(t, freqs, rotary_interleaved, pairs, mscale, **further)
        if pairs:
            t = _halves(t, freqs.shape[-1])
        rotated: Tensor = rotate(t, freqs, rotary_interleaved)
        return rotated

    return _apply_rotary_pos_emb_bshd


def rotate_in_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the context manager ``TransformerLayer._patch_apply_rotary_pos_emb``: rotate with the platform's kernel.

    In this context, mcore-bridge rotates with another function, which scales by the model's ``attention_scaling`` and
    takes further arguments. The kernel replaces that function if the scaling is 1 and there are no such arguments.
    """
    from megatron.core.models.common.embeddings import rope_utils

    from anytron_megatron.portable_te.binding import kernels

    rotate = kernels().fused(KernelName.ROPE, None)

    @contextlib.contextmanager
    @functools.wraps(original)
    def _patch_apply_rotary_pos_emb(self: Any) -> Iterator[None]:
        with original(self):
            config = self.config
            if not config.apply_rope_fusion and config.attention_scaling == 1:
                theirs = rope_utils._apply_rotary_pos_emb_bshd
                rope_utils._apply_rotary_pos_emb_bshd = functools.partial(
                    _rotated, rotate, theirs, config.multi_latent_attention
                )
            yield  # the original puts back what there was before it

    return _patch_apply_rotary_pos_emb


def _rotated(
    rotate: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    latent: bool,
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool | None = None,
    multi_latent_attention: bool | None = None,
    mscale: float = 1.0,
    **further: Any,
) -> Tensor:
    del mscale  # theirs has the model's own, 1
    # Megatron's name for it from 0.19 on, the one before, and the model's own answer.
    pairs = next((said for said in (mla_rotary_interleaved, multi_latent_attention) if said is not None), latent)
    if further:
        return theirs(t, freqs, rotary_interleaved, mla_rotary_interleaved=pairs, **further)
    if pairs:
        t = _halves(t, freqs.shape[-1])
    return rotate(t, freqs, rotary_interleaved)


def _halves(t: Tensor, size: int) -> Tensor:
    """Move even entries of the first ``size`` before odd ones: queries and keys alike, so scores do not change."""
    return torch.cat((t[..., 0:size:2], t[..., 1:size:2], t[..., size:]), dim=-1)


def tell_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel._preprocess``: pass the inference context to ``_get_rotary_pos_emb``, which it calls.

    A model with three axes of positions (mrope) gets them for all columns of the cache, the same on all axes, as text
    has them: of the embeddings Megatron takes the part from the step's first position on.
    """

    @functools.wraps(original)
    def _preprocess(self: Any, *args: Any, inference_context: Any = None, **kwargs: Any) -> Any:
        if inference_context is None:
            return original(self, *args, **kwargs)
        whole = self._get_rotary_pos_emb
        columns = torch.arange(inference_context.max_sequence_length).expand(3, 1, -1)

        def told(decoder_input: Any, position_ids: Tensor, packed_seq_params: Any) -> Any:
            positions = columns if self.position_embedding_type == "mrope" else position_ids
            return whole(decoder_input, positions, packed_seq_params, inference_context=inference_context)

        self._get_rotary_pos_emb = told
        try:
            return original(self, *args, inference_context=inference_context, **kwargs)
        finally:
            del self._get_rotary_pos_emb

    return _preprocess


def keep_table(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that changes ``ROPE_INIT_FUNCTIONS``: restore the table after each call."""

    @functools.wraps(original)
    def get_rope_inv_freq(*args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        before = dict(ROPE_INIT_FUNCTIONS)
        try:
            return original(*args, **kwargs)
        finally:
            ROPE_INIT_FUNCTIONS.clear()
            ROPE_INIT_FUNCTIONS.update(before)

    return get_rope_inv_freq

"""Fix Qwen3-VL's deepstack: features of the vision tower's middle layers are added to the first text layers.

mcore-bridge has three faults here. It arranges the map of image tokens sequence-major, ``[S, B]``, as Megatron's
hidden states are, but leaves the features batch-major: with several padded rows they reach the wrong images. With
context parallelism it numbers the tokens of the first row only. With sequence parallelism each rank has the
gradient of its own slice, and Megatron averages over the ranks as if each had the whole gradient.

Here every slot carries the number of its feature, and the numbers are sharded in the same way as the slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Recorder:
    """Wrap a vision tower and keep its deepstack features."""

    def __init__(self, visual: Any) -> None:
        self._visual = visual
        self.dtype = visual.dtype
        self.features: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._visual(*args, **kwargs)
        if output.deepstack_features:
            self.features = torch.stack(list(output.deepstack_features))
        return output


def number_features(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``Qwen3VL_Vit._get_inputs_embeds``."""

    def _get_inputs_embeds(
        self: Any, inputs_embeds: Tensor, inputs: dict[str, Any], visual: Any, hf_config: Any
    ) -> dict[str, Tensor | None]:
        recorder = _Recorder(visual)
        embeds = self._hf_get_inputs_embeds(inputs_embeds, inputs, recorder, hf_config)
        features, here = recorder.features, None
        if inputs.get("pixel_values") is not None or inputs.get("pixel_values_videos") is not None:
            number = _local(_feature_numbers(inputs, hf_config), inputs, self.config)
            here = number >= 0
            if features is not None:
                features = _summed_gradient(features, self.config)[:, number[here]]
        return {"inputs_embeds": embeds, "visual_pos_masks": here, "deepstack_visual_embeds": features}

    return _get_inputs_embeds


def _feature_numbers(inputs: dict[str, Any], hf_config: Any) -> Tensor:
    """Number the slots by feature, -1 for text: int64 ``[B, S]``; features of images come before those of videos."""
    ids, types = inputs["input_ids"], inputs.get("mm_token_type_ids")
    number, first = torch.full_like(ids, -1), 0
    for kind, (values, token) in enumerate(
        (("pixel_values", hf_config.image_token_id), ("pixel_values_videos", hf_config.video_token_id)), start=1
    ):
        if inputs.get(values) is not None:
            slots = ids == token if types is None else types == kind
            count = slots.flatten().cumsum(0).view_as(ids)
            number = torch.where(slots, first + count - 1, number)
            first = first + count[-1, -1]
    return number


def _local(number: Tensor, inputs: dict[str, Any], config: Any) -> Tensor:
    """Take the slots that this rank's layers hold: ``[B, S]`` -> ``[S / cp / tp, B]``."""
    from mcore_bridge.utils import split_cp_inputs
    from megatron.core import parallel_state

    if config.context_parallel_size > 1:
        number = split_cp_inputs(number, getattr(inputs.get("packed_seq_params"), "cu_seqlens_q", None), 1)
    number = number.t()
    if config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        number = number.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    return number.contiguous()


def _summed_gradient(features: Tensor, config: Any) -> Tensor:
    """Sum the gradient over the ranks' slices, so that Megatron's average is right."""
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    return copy_to_tensor_model_parallel_region(features) if config.sequence_parallel else features

"""Fixes of parts of models: deepstack features, routers of experts, the head of a classifier, and their optimizer."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from anytron.base.errors import EngineError
from anytron.device.patches import Installed
from anytron.sequences.masks import current_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from anytron.device.hooks.types import PatchContext

_JOINED = ("glm4", "glm4v_text")
"""Language models whose feed-forward networks have gate and up projection in one layer, in transformers."""
_ERNIE, _ERNIE_BIAS = "ernie4_5_moe", "moe_statics.e_score_correction_bias"
_TRANSPOSED = "qwen3_vl_moe"
"""The family whose published files have the weights of experts transposed, by transformers 5."""


def refuse_offload_to_the_device(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``HybridDeviceOptimizer.__init__``: refuse to offload a part of the optimizer where the host is the device.

    Megatron puts a weight's copy on the host into one of two groups by ``copy.is_cuda``. If the host is the device,
    that is True, so that the copy is in the group of weights that stay, gets no gradient, and is never written back.
    """

    @functools.wraps(original)
    def __init__(self: Any, params: Any, offload_fraction: float = 0.5, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if offload_fraction > 0 and torch.empty(0, device="cpu").is_cuda:
            raise EngineError(
                "The optimizer's state cannot be offloaded to the host: the host is the device.",
                where=f"HybridDeviceOptimizer, offload_fraction={offload_fraction}",
                why="Megatron tells a weight from its copy by the device, and would not update the offloaded weights",
                fix="set optimizer_cpu_offload=False (in Megatron-LM's scripts: remove --optimizer-cpu-offload)",
            )
        original(self, params, offload_fraction, *args, **kwargs)

    return __init__


def number_features(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``Qwen3VL_Vit._get_inputs_embeds``: collect the vision features that text layers add.

    mcore-bridge has three faults here. It arranges the map of image tokens sequence-major, ``[S, B]``, as Megatron's
    hidden states are, but leaves the features batch-major: with several padded rows they reach the wrong images. With
    context parallelism it numbers the tokens of the first row only. With sequence parallelism each rank has the
    gradient of its own slice, and Megatron averages over the ranks as if each had the whole gradient.

    Here each token position carries the number of its feature, and the numbers are sharded as the positions are.
    """

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


def keep_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``GPTBridge._split_tp``, which cuts a rank's part out of a tensor: pad only tensors that are cut.

    Each tensor-parallel rank has all of a classifier's head.
    """

    @functools.wraps(original)
    def _split_tp(self: Any, hf_weight: Tensor, tp_dim: int | None, is_expert: bool, is_embedding: bool) -> Tensor:
        return original(self, hf_weight, tp_dim, is_expert, is_embedding=is_embedding and tp_dim is not None)

    return _split_tp


def join_gate_and_up(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``GPTBridge._set_mlp_state``: export the projections of GLM-4's feed-forward networks as files have them.

    Files have gate and up projection in one tensor, ``gate_up_proj``, and so have adapters: the rows of the gate come
    first, and ``lora_A`` is the same for both. mcore-bridge reads that, and exports two tensors.
    """

    @functools.wraps(original)
    def _set_mlp_state(
        self: Any,
        mg_mlp: Any,
        hf_state_dict: Any,
        hf_prefix: str,
        layer_idx: int,
        to_mcore: bool,
        ep_rank: int | None = None,
        is_mtp: bool = False,
    ) -> dict[str, Any]:
        state = original(self, mg_mlp, hf_state_dict, hf_prefix, layer_idx, to_mcore, ep_rank, is_mtp)
        if to_mcore or self.llm_model_type not in _JOINED:
            return state
        gate, up, whole = (f"{hf_prefix}{part}_proj." for part in ("gate", "up", "gate_up"))
        joined: dict[str, Any] = {}
        for name, tensor in state.items():
            if name.startswith(gate):
                kind = name.removeprefix(gate)
                rows = tensor if kind.startswith("lora_A") else torch.cat([tensor, state[up + kind]])
                joined[whole + kind] = rows
            elif not name.startswith(up):
                joined[name] = tensor
        return joined

    return _set_mlp_state


def read_either_orientation(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``GPTBridge._set_moe_state``: read the experts of a Qwen3-VL-MoE whichever way round a file has them.

    Published files have a layer's ``gate_up_proj`` as ``[E, H, 2 I]`` and its ``down_proj`` as ``[E, I, H]``, for E
    experts, hidden size H and expert size I; files that transformers 5 writes have ``[E, 2 I, H]`` and ``[E, H, I]``.
    mcore-bridge takes each for the former, reshapes the latter without an error, and writes the former.
    """

    @functools.wraps(original)
    def _set_moe_state(
        self: Any,
        mg_mlp: Any,
        hf_state_dict: dict[str, Any],
        hf_prefix: str,
        layer_idx: int,
        to_mcore: bool,
        is_mtp: bool = False,
    ) -> dict[str, Any]:
        if to_mcore and self.model_type == _TRANSPOSED:
            rows = {"gate_up_proj": self.config.hidden_size, "down_proj": self.config.moe_ffn_hidden_size}
            experts = {f"{hf_prefix}experts.{part}": size for part, size in rows.items()}
            hf_state_dict = {
                name: _Oriented(tensor, experts[name]) if name in experts else tensor
                for name, tensor in hf_state_dict.items()
            }
        return original(self, mg_mlp, hf_state_dict, hf_prefix, layer_idx, to_mcore, is_mtp)

    return _set_moe_state


class _Oriented:
    """A tensor of a file, ``[E, rows, columns]`` when it is loaded, if the file has it so or the other way round."""

    def __init__(self, tensor: Any, rows: int) -> None:
        self._tensor, self._rows = tensor, rows

    def load(self) -> Tensor:
        loaded: Tensor = self._tensor.load()
        return loaded if loaded.shape[1] == self._rows else loaded.transpose(1, 2)


def choose_by_biased_softmax(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap Megatron's ``topk_routing_with_score_function``: experts of a softmax may be chosen with a bias.

    ERNIE-4.5's routers choose by the softmax of all logits plus a bias, and weigh the chosen experts by the softmax
    of their logits (``ernie4_5_moe/modeling_ernie4_5_moe.py``, ``Ernie4_5_MoeTopKRouter``). Megatron ignores the bias.
    """

    @functools.wraps(original)
    def topk_routing_with_score_function(logits: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        bias = settings.get("expert_bias")
        if bias is not None and settings.get("score_function") == "softmax" and not settings.get("use_pre_softmax"):
            settings["router_replay"] = _Biased(bias, settings.get("router_replay"))
        return original(logits, *args, **settings)

    return topk_routing_with_score_function


class _Biased:
    """Chooses experts by a softmax and a bias, or lets the router's replay choose by these scores."""

    def __init__(self, bias: Tensor, replay: Any) -> None:
        self._bias, self._replay = bias, replay

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            ranked = scores.float().softmax(-1) + self._bias
            if self._replay is None:
                _, experts = choose(ranked, topk, num_groups=num_groups, group_topk=group_topk)
            else:
                _, experts = self._replay.get_replay_topk(ranked, topk, num_groups, group_topk, choose)
        return scores.gather(1, experts), experts


def read_ernie_bias(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTBridge._set_router``: ERNIE-4.5's files have the routers' bias under another name, as ``[1, E]``."""

    @functools.wraps(original)
    def _set_router(self: Any, mg_mlp: Any, hf_state_dict: dict[str, Any], to_mcore: bool, **more: Any) -> None:
        if self.llm_model_type != _ERNIE:
            return original(self, mg_mlp, hf_state_dict, to_mcore, **more)
        named = self.hf_expert_bias_key
        if to_mcore:
            hf_state_dict = {named if name == _ERNIE_BIAS else name: value for name, value in hf_state_dict.items()}
        original(self, mg_mlp, hf_state_dict, to_mcore, **more)
        if not to_mcore and (bias := hf_state_dict.pop(named, None)) is not None:
            hf_state_dict[_ERNIE_BIAS] = bias.view(1, -1)
        return None

    return _set_router


_PLACES = ("image_token_id", "video_token_id", "audio_token_id")
"""Fields of a configuration that number the places of images, videos and sound in a text."""


def embed_places(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``MultimodalGPTModel.forward``: embed the places of images, videos and sound as transformers does.

    Gemma 4 embeds such a place as ``pad_token_id`` (``gemma4/modeling_gemma4.py``, line 2386) and Muse Glimmer as token
    0 (``muse_glimmer/modeling_muse_glimmer.py``, line 1011); the output of a tower replaces it. Here towers get no
    images, so that a place in a text stays what it is; mcore-bridge embeds the place's number.
    """

    @functools.wraps(original)
    def forward(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = self.config.hf_config
        if whole.model_type in ("gemma4", "gemma4_unified", "muse_glimmer"):
            numbers = [number for name in _PLACES if (number := getattr(whole, name, None)) is not None]
            places = torch.isin(input_ids, input_ids.new_tensor(numbers))
            shown = 0 if whole.model_type == "muse_glimmer" else whole.text_config.pad_token_id
            input_ids = input_ids.masked_fill(places, shown)
        return original(self, input_ids, *args, **kwargs)

    return forward


def embed_text_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Llama4Vit.get_inputs_embeds``: without images, do not run a frozen tower.

    The original adds 0 times what the tower makes of an image of zeros, so that a tower which is trained has a gradient
    on every rank.
    """

    @functools.wraps(original)
    def get_inputs_embeds(self: Any, inputs_embeds: Tensor, **inputs: Any) -> Any:
        trained = any(parameter.requires_grad for parameter in self.parameters())
        if inputs.get("pixel_values") is None and not trained:
            return inputs_embeds
        return original(self, inputs_embeds, **inputs)

    return get_inputs_embeds


def hear_without_a_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_audio_features`` of the towers of Qwen2.5-Omni and Qwen3-Omni: call the thinker body's method.

    mcore-bridge calls, on its towers, the method of transformers' thinker with its output layer. That passes the call
    on to ``self.model``, the thinker's body, which mcore-bridge's towers do not have.
    """

    @functools.wraps(original)
    def get_audio_features(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.model_cls.__name__.replace("ForConditionalGeneration", "Model")
        body = getattr(sys.modules[self.model_cls.__module__], name)
        with self.patch_hf_config():
            return body.get_audio_features(self, *args, **kwargs)

    return get_audio_features


def mask_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.forward(self, input, padding_mask=None)``: leave padding out of routing statistics.

    The statistics are auxiliary losses, and the token counts that expert biases follow. The current micro-batch's
    padding mask, if there is one, replaces the argument, whatever the layers above have passed.
    """

    @functools.wraps(original)
    def forward(self: Any, input: Tensor, padding_mask: Tensor | None = None, **more: Any) -> Any:
        mask = current_mask()
        if mask is not None and mask.padding_mask is not None:
            padding_mask = _of_this_rank(mask.padding_mask, self, input)
        return original(self, input, padding_mask, **more)

    return forward


def _of_this_rank(padding_mask: Tensor, router: Any, hidden: Tensor) -> Tensor:
    """Arrange a mask ``[R, C]`` of this context-parallel rank as a router's input: bool ``[S, B]``, True = MASKED."""
    mask = padding_mask.t()
    if router.config.sequence_parallel:
        mask = mask.chunk(router.tp_group.size())[router.tp_group.rank()]
    if mask.shape != hidden.shape[:2]:
        raise EngineError(
            "The router's tokens do not match the tokens of the micro-batch.",
            where="padding mask of mixture-of-experts routing",
            why=f"the mask has the shape {tuple(mask.shape)} (sequence, batch), but the hidden states have "
            f"{tuple(hidden.shape[:2])}",
            fix="call the model through anytron_megatron.forward(model, prepared), which sets the micro-batch's mask",
        )
    return mask


def define_missing_gemm(_context: PatchContext) -> Installed:
    """Define ``te_general_gemm`` as None, as Megatron's routers expect where there is no Transformer Engine."""
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    module.te_general_gemm = None  # type: ignore[attr-defined]
    return Installed(lambda: delattr(module, "te_general_gemm"))

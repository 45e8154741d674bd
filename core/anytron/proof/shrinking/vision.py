"""New sizes of a vision tower that reads an image as patches, or of the projection of patches that one has instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.proof.shrinking.language import HEAD_DIM, first, scaled

if TYPE_CHECKING:
    from collections.abc import Mapping

DEPTH = ("depth", "num_hidden_layers")
HEADS = ("num_heads", "num_attention_heads")
_AFTER = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
"""Sizes of layers after the tower (Llama 4)."""
PATCH = 4
"""Pixels of the side of a patch."""
_SIDE = 8
"""Patches of the side of the image for which positions are embedded."""


def new_vision_sizes(known: Mapping[str, Any], width: int, new_width: int) -> dict[str, Any]:
    """Choose the sizes of a vision tower.

    Args:
        known: Fields of ``vision_config``, with the defaults of its class.
        width: Width of the language model.
        new_width: New width of the language model.

    Returns:
        New values by field, for the fields that are set and change.
    """
    if is_projection(known):
        side = PATCH * (known.get("pooling_kernel_size") or 1)
        sizes = {
            "mm_embed_dim": new_width,
            "output_proj_dims": new_width,
            "patch_size": PATCH,
            "model_patch_size": side,
        }
        return {name: value for name, value in sizes.items() if known.get(name) is not None and known[name] != value}
    _, depth = first(known, DEPTH)
    _, heads = first(known, HEADS)
    tower = "embed_dim" if known.get("embed_dim") else "hidden_size"  # Qwen2-VL's hidden_size is the language model's
    new_heads = min(heads, 2)
    chosen: dict[str, Any] = {
        **dict.fromkeys(HEADS, new_heads),
        **{name: new_width for name in ("hidden_size", "out_hidden_size") if known.get(name) == width},
        "num_key_value_heads": new_heads,
        **dict.fromkeys(("head_dim", "global_head_dim"), HEAD_DIM),
        tower: new_heads * HEAD_DIM,
        **_places(known, depth),
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "image_size": PATCH * _SIDE,
        "num_position_embeddings": (_SIDE // 2) ** 2,
        "window_size": PATCH * (known.get("spatial_merge_size") or 1) * 2,
    }
    if inner := known.get("intermediate_size"):
        # Where the tower's last layer is as wide as the language model, this is a size of that layer (GLM-4.1V).
        chosen["intermediate_size"] = scaled(inner, known[tower], chosen[tower], HEAD_DIM)
    for name in _AFTER:
        if size := known.get(name):
            chosen[name] = scaled(size, known[tower], chosen[tower], HEAD_DIM)
    return {name: value for name, value in chosen.items() if known.get(name) is not None and known[name] != value}


def is_projection(known: Mapping[str, Any]) -> bool:
    """Return whether patches are projected into the language model's width, without layers (Gemma 4 12B)."""
    return bool(known.get("mm_embed_dim")) and first(known, DEPTH)[1] is None


def _places(known: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The depth, and the layers that are different or whose outputs the language model takes."""
    full, deep = known.get("fullatt_block_indexes") or [], known.get("deepstack_visual_indexes") or []
    new_depth = min(depth, max(2, 2 * min(2, len(full)), len(deep) + 2 if deep else 0))
    new: dict[str, Any] = dict.fromkeys(DEPTH, new_depth)
    if full:  # each at the end of its part of the tower
        new["fullatt_block_indexes"] = [*range(1, new_depth, 2)][: len(full)]
    if deep:
        new["deepstack_visual_indexes"] = [*range(1, len(deep) + 1)]
    return new

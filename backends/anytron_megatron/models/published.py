"""Optional fields of published configurations that mcore-bridge reads as if every file had them.

What transformers takes is taken: :func:`completed` fills in what transformers computes without the field. Imports no
Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPLETED = frozenset({"rope_type", "factor", "mscale", "mscale_all_dim"})
"""Rotary fields that mcore-bridge reads by subscript, and :func:`completed` fills in where a file lacks them."""


def completed(converted: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the rotary fields that mcore-bridge wants and a published configuration may lack, or have as null.

    The defaults are those of transformers: ``mscale_all_dim`` 0 leaves the scale of the softmax alone
    (``yarn_apply_mscale`` of its DeepSeek-V3), and where either ``mscale`` is 0 the embeddings are scaled by ``factor``
    alone, which is the ratio of the two context lengths if it is null (``_compute_yarn_parameters``).

    Args:
        converted: What ``hf_to_mcore_config`` returns, with ``rope_scaling``; neither is changed.
    """
    rotary = converted.get("rope_scaling")
    if not rotary or any(isinstance(value, dict) for value in rotary.values()):  # one for each type of layer
        return dict(converted)
    given = {key: value for key, value in rotary.items() if value is not None}
    whole: dict[str, Any] = {"rope_type": given.get("type", "default"), **given}
    if whole["rope_type"] == "yarn":
        first = given.get("original_max_position_embeddings", converted["max_position_embeddings"])
        stretched = converted["max_position_embeddings"] / first
        whole = {"factor": stretched, "mscale": 0.0, "mscale_all_dim": 0.0, **whole}
    return {**converted, "rope_scaling": whole}

"""Fused routing of experts: names that Megatron imports if Transformer Engine is 2.7 or later."""

from __future__ import annotations

from typing import NoReturn

from anytron_megatron.portable_te.refusals import refuse


def fused_topk_with_score_function(*_args: object, **_settings: object) -> NoReturn:
    """Raise an error: there is no fused choice of experts."""
    _refuse("fused_topk_with_score_function")


def fused_compute_score_for_moe_aux_loss(*_args: object, **_settings: object) -> NoReturn:
    """Raise an error: there is no fused computation of the auxiliary loss's scores."""
    _refuse("fused_compute_score_for_moe_aux_loss")


def fused_moe_aux_loss(*_args: object, **_settings: object) -> NoReturn:
    """Raise an error: there is no fused auxiliary loss."""
    _refuse("fused_moe_aux_loss")


def _refuse(name: str) -> NoReturn:
    refuse(f"router.{name}", "fused routing", "set moe_router_fusion to false")

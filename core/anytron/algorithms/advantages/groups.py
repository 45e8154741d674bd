"""Look at the samples of a step group by group; groups may have different sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from collections.abc import Callable


def group_sizes(groups: Tensor) -> list[int]:
    """Count the samples of each group, ``P`` groups, from the number of each sample's group, int64 ``[N]``."""
    sizes: list[int] = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    return sizes


def by_group(values: Tensor, groups: Tensor) -> Tensor:
    """Give each group a row.

    Args:
        values: float ``[N]``.
        groups: int64 ``[N]``, the number of each sample's group; those of a group stand side by side.

    Returns:
        ``[P, G]`` with the size G of the largest group; NaN behind the end of a smaller one.
    """
    return pad_sequence(list(values.split(group_sizes(groups))), batch_first=True, padding_value=torch.nan)


def compare(values: Tensor, groups: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a formula of groups to samples.

    Args:
        values: float ``[N]``, finite.
        groups: As in :func:`by_group`.
        formula: Maps ``[P, G]`` to ``[P, G]``, where NaN says that a group has no further sample.

    Returns:
        ``[N]``.
    """
    rows = by_group(values, groups)
    return formula(rows)[~rows.isnan()]


def differ(rewards: Tensor) -> Tensor:
    """Say which groups have signal: those in which not all rewards are equal (DAPO, arXiv:2503.14476, eq. 11).

    In the others nothing is better or worse than the rest. Equal is exact: because of rounding, equal rewards can have
    a deviation that is not quite 0.

    Args:
        rewards: float ``[P, G]``; NaN where there is none.

    Returns:
        bool ``[P]``.
    """
    return rewards.nan_to_num(-torch.inf).amax(dim=1) > rewards.nan_to_num(torch.inf).amin(dim=1)


def have_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Say which samples belong to a group with signal (:func:`differ`).

    Args:
        rewards: float ``[N]``; NaN for a sample that nothing is learnt from.
        groups: As in :func:`by_group`.

    Returns:
        bool ``[N]``, the same for all samples of a group.
    """
    return differ(by_group(rewards, groups)).repeat_interleave(torch.tensor(group_sizes(groups)))

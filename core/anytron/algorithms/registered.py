"""Find the advantage estimator and the policy loss that a configuration names, as reward functions are found."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytron.algorithms.contract import AdvantageFunction, Advantages, LossOutputs, NamedLossFunction
from anytron.algorithms.gae import critic_advantages
from anytron.algorithms.grpo import group_advantages
from anytron.algorithms.policy_loss import PolicyLoss
from anytron.config.imports import resolve
from anytron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.batch import RaggedBatch, TokenOutputs
    from anytron.config.schema import AlgorithmSection

ADVANTAGE_KEY, LOSS_KEY = "algorithm.advantage", "algorithm.loss"

ADVANTAGES: Mapping[str, AdvantageFunction] = MappingProxyType({"grpo": group_advantages, "gae": critic_advantages})
"""By their name in ``algorithm.advantage``."""


def clipped(outputs: TokenOutputs, batch: RaggedBatch, algorithm: AlgorithmSection) -> LossOutputs:
    """Compute :class:`~anytron.algorithms.policy_loss.PolicyLoss` with the configuration's coefficients."""
    return PolicyLoss.from_config(algorithm)(outputs, batch)


LOSSES: Mapping[str, NamedLossFunction] = MappingProxyType({"clipped": clipped})
"""By their name in ``algorithm.loss``."""


def load_advantage(algorithm: AlgorithmSection) -> AdvantageFunction:
    """Find the estimator.

    Raises:
        ConfigError: There is none of that name, or it does not take ``(batch, rewards, algorithm, group_size)``.
    """
    takes = "(batch, rewards, algorithm, group_size)"
    function: AdvantageFunction = _load(algorithm.advantage, ADVANTAGE_KEY, ADVANTAGES, 4, takes)
    return function


def load_loss(algorithm: AlgorithmSection) -> NamedLoss:
    """Find the policy loss.

    Raises:
        ConfigError: There is none of that name, or it does not take ``(outputs, batch, algorithm)``.
    """
    _loss_function(algorithm)
    return NamedLoss(algorithm)


def with_advantages(batch: RaggedBatch, rewards: Tensor, group_size: int, algorithm: AlgorithmSection) -> RaggedBatch:
    """Estimate advantages and give them to the batch's response tokens; with a critic, returns as well.

    Args:
        batch: B sequences, groups side by side; with its ``values`` if there is a critic.
        rewards: float32 ``[B]``; NaN for a sample that is dropped. It leaves the response mask and its group; a
            function of the user's, which knows groups of one size only, is spared the whole group.
        group_size: Samples of one prompt.
        algorithm: Names the estimator.

    Raises:
        DataError: The estimator returns something unusable.
    """
    ours = algorithm.advantage in ADVANTAGES
    dropped = rewards.isnan()
    if not ours:
        dropped = dropped.view(-1, group_size).any(dim=1).repeat_interleave(group_size)
    kept = ~torch.repeat_interleave(dropped, batch.lengths)
    batch = replace(batch, response_mask=batch.response_mask & kept)
    if ours or not bool(dropped.any()):
        found = _estimate(batch, rewards, group_size, algorithm)
        return replace(batch, advantages=found.per_token, returns=found.returns)
    rest = torch.nonzero(~dropped).flatten()
    if not rest.numel():
        raise DataError(
            "Every prompt of the step has a sample that was dropped.",
            where=f"{ADVANTAGE_KEY}: {algorithm.advantage}",
            why="a function of your own is given complete groups only, and there is none",
            fix="correct the rewards, or set rewards[].on_error=zero",
        )
    found = _estimate(batch.select(rest), rewards[rest], group_size, algorithm)

    def whole(values: Tensor) -> Tensor:
        return torch.zeros(batch.num_tokens, dtype=values.dtype).masked_scatter(kept, values)

    returns = None if found.returns is None else whole(found.returns)
    return replace(batch, advantages=whole(found.per_token), returns=returns)


def _estimate(batch: RaggedBatch, rewards: Tensor, group_size: int, algorithm: AlgorithmSection) -> Advantages:
    found = load_advantage(algorithm)(batch, rewards, algorithm, group_size)
    if not isinstance(found, Advantages):
        raise _unusable(ADVANTAGE_KEY, algorithm.advantage, f"a {type(found).__name__}, not an Advantages")
    wanted = {"advantages": found.per_token, "returns": found.returns}
    for name, values in wanted.items():
        if values is None and (name == "advantages" or batch.values is not None):
            raise _unusable(ADVANTAGE_KEY, algorithm.advantage, f"no {name}")
        if values is not None and values.shape != (batch.num_tokens,):
            shapes = f"{name} of shape {list(values.shape)} for {batch.num_tokens} tokens"
            raise _unusable(ADVANTAGE_KEY, algorithm.advantage, shapes)
        if values is not None and not bool(torch.isfinite(values[batch.response_mask]).all()):
            raise _unusable(ADVANTAGE_KEY, algorithm.advantage, f"{name} that are not finite")
    return found


@dataclass(frozen=True)
class NamedLoss:
    """The policy loss that ``algorithm.loss`` names. It travels by that name: each rank finds the function itself."""

    algorithm: AlgorithmSection

    def __call__(self, outputs: TokenOutputs, batch: RaggedBatch) -> LossOutputs:
        """Compute one micro-batch's part of the loss.

        Raises:
            DataError: A function of the user's returns something unusable.
        """
        name = self.algorithm.loss
        found = _loss_function(self.algorithm)(outputs, batch, self.algorithm)
        if name in LOSSES:
            return found  # proved by tests; looking at its value here would wait for the device
        if not isinstance(found, LossOutputs):
            raise _unusable(LOSS_KEY, name, f"a {type(found).__name__}, not a LossOutputs")
        if found.loss.shape != ():
            raise _unusable(LOSS_KEY, name, f"a loss of shape {list(found.loss.shape)}, not a scalar")
        return found  # the engine looks whether it is finite: raising on one rank would leave the others waiting


def _loss_function(algorithm: AlgorithmSection) -> NamedLossFunction:
    function: NamedLossFunction = _load(algorithm.loss, LOSS_KEY, LOSSES, 3, "(outputs, batch, algorithm)")
    return function


def _load(reference: str, key: str, registered: Mapping[str, Callable[..., Any]], count: int, takes: str) -> Any:
    function = resolve(reference, key=key, registered=registered)
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise ConfigError(
            f"{reference} cannot be called as {key} is.",
            where=key,
            why=f"{error}; it takes {inspect.signature(function)}",
            fix=f"let it take {takes}",
        ) from error
    return function


def _unusable(key: str, name: str, returned: str) -> DataError:
    return DataError(f"{key} returns something unusable.", where=f"{key}: {name}", why=f"it returned {returned}")

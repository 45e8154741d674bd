"""Find the advantage estimator and the policy loss that a configuration names, as reward functions are found."""

from __future__ import annotations

import inspect
import sys
import traceback
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from anytron.algorithms.advantages.gae import critic_advantages
from anytron.algorithms.advantages.grpo import centred_group_advantages, group_advantages
from anytron.algorithms.advantages.none import no_advantages
from anytron.algorithms.advantages.reinforce_plus_plus import return_advantages, returns_against_group
from anytron.algorithms.advantages.rloo import leave_one_out_advantages
from anytron.algorithms.contract import AdvantageFunction, Advantages, PolicyLossFunction
from anytron.algorithms.losses.cispo import cispo
from anytron.algorithms.losses.gspo import gspo, gspo_token
from anytron.algorithms.losses.ppo_clip import ppo_clip
from anytron.algorithms.losses.sapo import sapo
from anytron.algorithms.token_rewards import rewards_and_token_rewards
from anytron.config.imports import resolve
from anytron.errors import AnytronError, ConfigError, DataError
from anytron.files import exhausted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.batch import RaggedBatch
    from anytron.config.algorithm import AlgorithmSection

Returned = TypeVar("Returned")

ADVANTAGE_KEY, LOSS_KEY = "algorithm.advantage", "algorithm.loss"

ADVANTAGES: Mapping[str, AdvantageFunction] = MappingProxyType(
    {
        "grpo": group_advantages,
        "dr_grpo": centred_group_advantages,
        "rloo": leave_one_out_advantages,
        "reinforce_plus_plus": return_advantages,
        "reinforce_plus_plus_baseline": returns_against_group,
        "gae": critic_advantages,
        "none": no_advantages,
    }
)
"""By their name in ``algorithm.advantage``."""
LOSSES: Mapping[str, PolicyLossFunction] = MappingProxyType(
    {"ppo_clip": ppo_clip, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo}
)
"""By their name in ``algorithm.loss``."""


def load_advantage(algorithm: AlgorithmSection) -> AdvantageFunction:
    """Find the estimator.

    Raises:
        ConfigError: There is none of that name, or it does not take ``(batch, rewards, algorithm)``.
    """
    takes = "(batch, rewards, algorithm)"
    function: AdvantageFunction = _load(algorithm.advantage, ADVANTAGE_KEY, ADVANTAGES, 3, takes)
    return function


def policy_loss_function(algorithm: AlgorithmSection) -> PolicyLossFunction:
    """Find the policy's loss of a token.

    Raises:
        ConfigError: There is none of that name, or it does not take ``(tokens, algorithm)``.
    """
    function: PolicyLossFunction = _load(algorithm.loss, LOSS_KEY, LOSSES, 2, "(tokens, algorithm)")
    return function


def with_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> RaggedBatch:
    """Estimate advantages and give them to the batch's response tokens; with a critic, returns as well.

    Args:
        batch: B sequences with ``groups``; with ``values`` if there is a critic, and with the log-probs of the old
            policy and the reference if rewards are penalised.
        rewards: float32 ``[B]``, finite.
        algorithm: Names the estimator.

    Raises:
        DataError: The estimator raises, or returns something unusable.
    """
    rewards, token_rewards = rewards_and_token_rewards(rewards, batch, algorithm)
    estimate, shown = load_advantage(algorithm), replace(batch, token_rewards=token_rewards)
    found = call(ADVANTAGE_KEY, algorithm.advantage, estimate, shown, rewards, algorithm)
    if not isinstance(found, Advantages):
        raise unusable(ADVANTAGE_KEY, algorithm.advantage, f"a {type(found).__name__}, not an Advantages")
    wanted = {"advantages": found.per_token, "returns": found.returns}
    for name, values in wanted.items():
        if values is None and (name == "advantages" or batch.values is not None):
            raise unusable(ADVANTAGE_KEY, algorithm.advantage, f"no {name}")
        if values is not None and not isinstance(values, Tensor):
            raise unusable(ADVANTAGE_KEY, algorithm.advantage, f"{name} that are a {type(values).__name__}")
        if values is not None and values.shape != (batch.num_tokens,):
            shapes = f"{name} of shape {list(values.shape)} for {batch.num_tokens} tokens"
            raise unusable(ADVANTAGE_KEY, algorithm.advantage, shapes)
        if values is not None and not bool(torch.isfinite(values[batch.response_mask]).all()):
            raise unusable(ADVANTAGE_KEY, algorithm.advantage, f"{name} that are not finite")
    # NumPy's are float64, which would make the loss so, and some devices have none.
    returns = None if found.returns is None else found.returns.float()
    return replace(batch, advantages=found.per_token.float(), returns=returns)


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


def call(key: str, name: str, function: Callable[..., Returned], *given: object) -> Returned:
    """Call what a key names, and say what a function of the user's raises, and where. Bugs of registered ones are ours.

    Raises:
        DataError: The user's function raised. The cause is what it raised, by which a worker knows that there was no
            device memory left.
        AnytronError: It raised one.
        OSError: It raised one that says that the machine has run out of something.
    """
    try:
        return function(*given)
    except Exception as error:
        if ":" not in name or isinstance(error, AnytronError) or exhausted(error) is not None:
            raise
        file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        raise DataError(
            "A function of yours raised.",
            where=f"{key}: {name}",
            why=f"{type(error).__name__}: {error} (line {last.lineno} of {last.filename})",
            fix="correct the function",
        ) from error


def unusable(key: str, name: str, returned: str) -> DataError:
    """Say that a function that a key names returns what nobody can use."""
    return DataError(f"{key} returns something unusable.", where=f"{key}: {name}", why=f"it returned {returned}")

"""Find the advantage estimator and the policy loss that a configuration names, and call users' functions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from anytron.algorithms.advantages import (
    centred_group_advantages,
    critic_advantages,
    group_advantages,
    leave_one_out_advantages,
    no_advantages,
    return_advantages,
    returns_against_group,
)
from anytron.algorithms.contract import AdvantageFunction, Advantages, PolicyLossFunction, PolicyTokens, TokenLosses
from anytron.algorithms.kl import rewards_of_responses, rewards_of_tokens
from anytron.algorithms.losses import cispo, gspo, gspo_token, ppo_clip, sapo
from anytron.base.functions import Called, Kind, has
from anytron.config.imports import resolve
from anytron.sequences.batch import RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anytron.base.errors import AnytronError
    from anytron.config.algorithm import AlgorithmSection


_ALGORITHM = "algorithm is the section algorithm of the configuration"

ADVANTAGE = Kind(
    "algorithm.advantage",
    Called(
        "An estimator of advantages",
        ("batch", "rewards", "algorithm"),
        f"batch is a RaggedBatch, and {has(RaggedBatch)}; rewards is a float32 tensor with a number for each "
        f"sequence of batch; {_ALGORITHM}",
        f"an anytron.tasks.Advantages ({has(Advantages)}) of finite float32 tensors with a number for "
        "each token of batch",
    ),
)
LOSS = Kind(
    "algorithm.loss",
    Called(
        "A policy's loss",
        ("tokens", "algorithm"),
        f"tokens is a PolicyTokens, and {has(PolicyTokens)}; {_ALGORITHM}",
        f"an anytron.tasks.TokenLosses ({has(TokenLosses)}) of tensors with a number for each token, "
        "made of tokens.log_probs, so that they have a gradient",
    ),
)


TOKENS_AT_ONCE = 1 << 20
"""Tokens whose values are checked at a time."""
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
"""Advantage estimators by their name in ``algorithm.advantage``."""
OF_RESPONSES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "none"})
"""Names of the estimators that do not read the rewards of tokens."""
LOSSES: Mapping[str, PolicyLossFunction] = MappingProxyType(
    {"ppo_clip": ppo_clip, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo}
)
"""Policy losses by their name in ``algorithm.loss``."""


def load_advantage(algorithm: AlgorithmSection) -> AdvantageFunction:
    """Find the advantage estimator that ``algorithm.advantage`` names.

    Raises:
        ConfigError: No estimator has that name, or it does not accept ``(batch, rewards, algorithm)``.
    """
    return resolve(algorithm.advantage, ADVANTAGE, registered=ADVANTAGES)


def policy_loss_function(algorithm: AlgorithmSection) -> PolicyLossFunction:
    """Find the policy loss that ``algorithm.loss`` names.

    Raises:
        ConfigError: No loss has that name, or it does not accept ``(tokens, algorithm)``.
    """
    return resolve(algorithm.loss, LOSS, registered=LOSSES)


def with_advantages(batch: RaggedBatch, rewards: Tensor, algorithm: AlgorithmSection) -> RaggedBatch:
    """Estimate advantages and add them to the batch, for response tokens; with a critic, returns as well.

    Args:
        batch: B sequences with ``groups``; with ``values`` if there is a critic, and with the log-probs of the old
            policy and the reference if rewards are penalised.
        rewards: float32 ``[B]``, finite.
        algorithm: Section ``algorithm`` of the configuration, which names the estimator.

    Raises:
        DataError: The estimator raises, or returns an invalid value.
        ConfigError: The estimator does not exist, or cannot be imported.
    """
    estimate = load_advantage(algorithm)
    shown = batch
    if algorithm.advantage not in OF_RESPONSES:
        shown = replace(batch, token_rewards=rewards_of_tokens(rewards, batch, algorithm))
    whole = rewards_of_responses(rewards, batch, algorithm)
    found = call(ADVANTAGE, algorithm.advantage, estimate, shown, whole, algorithm)
    del shown  # its rewards of tokens are large
    refused = partial(unusable, ADVANTAGE, algorithm.advantage, estimate)
    if not isinstance(found, Advantages):
        raise refused(f"a {type(found).__name__}, not an Advantages")
    wanted = {"advantages": found.per_token, "returns": found.returns}
    for name, values in wanted.items():
        if values is None and (name == "advantages" or batch.values is not None):
            raise refused(f"no {name}")
        if values is not None and (fault := misfit(name, values, batch.num_tokens)):
            raise refused(fault)
        if values is not None and not _finite(values, batch.response_mask):
            raise refused(f"{name} that are not finite")
    # NumPy's are float64, which would make the loss so, and some devices have none.
    returns = None if found.returns is None else found.returns.float()
    return replace(batch, advantages=found.per_token.float(), returns=returns)


def _finite(values: Tensor, mask: Tensor) -> bool:
    """Return whether the values of all masked tokens are finite; temporary memory is that of one part of them."""
    parts = zip(values.split(TOKENS_AT_ONCE), mask.split(TOKENS_AT_ONCE), strict=True)
    return all(bool((part.isfinite() | ~own).all()) for part, own in parts)


def call(kind: Kind, name: str, function: Callable[..., Any], *given: object) -> Any:
    """Call the function that a key names; report an exception in a user's function with the place where it was raised.

    Args:
        kind: Kind of the function, which has the key.
        name: Value of the key: a registered name, or the import path of a user's function.
        function: The function.
        given: Arguments of the function.

    Raises:
        DataError: The user's function raised. Its cause is the original error, from which a worker can tell that the
            device ran out of memory.
        AnytronError: The function raised an AnytronError.
        OSError: The function raised an OSError which says that the machine ran out of something.
    """
    return kind.call.call(function, f"{kind.key}: {name}", *given) if ":" in name else function(*given)


def misfit(name: str, values: object, tokens: int) -> str:
    """Say in what way ``values`` are not a tensor with a number for each token; empty if they are such a tensor."""
    if not isinstance(values, Tensor):
        return f"a {type(values).__name__} as {name}"
    return "" if values.shape == (tokens,) else f"{name} of shape {list(values.shape)} for {tokens} tokens"


def unusable(kind: Kind, name: str, function: object, returned: str) -> AnytronError:
    """Return the error for a function that returned an invalid value.

    Args:
        kind: Kind of the function, which has the key that names it.
        name: Value of the key.
        function: The function.
        returned: What it returned, as a phrase that follows "it returned".
    """
    return kind.call.unusable(function, returned).error(f"{kind.key}: {name}")

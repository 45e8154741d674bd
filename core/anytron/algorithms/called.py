"""How estimators of advantages and losses of a user are called."""

from __future__ import annotations

from anytron.algorithms.contract import Advantages, PolicyTokens, TokenLosses
from anytron.base.functions import Called, Kind, has
from anytron.sequences.batch import RaggedBatch

_ALGORITHM = "algorithm is the section algorithm of the configuration"

ADVANTAGE = Kind(
    "algorithm.advantage",
    Called(
        "An estimator of advantages",
        ("batch", "rewards", "algorithm"),
        f"batch is a RaggedBatch, and {has(RaggedBatch)}; rewards is a float32 tensor with a number for each "
        f"sequence of batch; {_ALGORITHM}",
        f"an anytron.algorithms.contract.Advantages ({has(Advantages)}) of finite float32 tensors with a number for "
        "each token of batch",
    ),
)
LOSS = Kind(
    "algorithm.loss",
    Called(
        "A policy's loss",
        ("tokens", "algorithm"),
        f"tokens is a PolicyTokens, and {has(PolicyTokens)}; {_ALGORITHM}",
        f"an anytron.algorithms.contract.TokenLosses ({has(TokenLosses)}) of tensors with a number for each token, "
        "made of tokens.log_probs, so that they have a gradient",
    ),
)

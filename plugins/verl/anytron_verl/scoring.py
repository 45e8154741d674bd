"""Wrap one of verl's engines in the functions that :mod:`anytron.proof.verification.scores` checks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from anytron_verl.configuration import engine_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TOKENS_PER_MICRO_BATCH = 64
"""Most tokens in a micro-batch: so few that the checks' sequences need several micro-batches."""


class ScoringEngine:
    """One of verl's engines, built like that of an actor, for scoring sequences.

    Args:
        section: ``actor_rollout_ref`` of verl's configuration.
        packed: Whether to use packed sequences or padded rows.
        alone: Whether to use one rank instead of the configured parallel sizes.
        trains: Whether to compute gradients.
    """

    def __init__(self, section: Any, *, packed: bool, alone: bool, trains: bool) -> None:
        parts = engine_parts(section, packed=packed, alone=alone, trains=trains)
        self.engine = EngineRegistry.new("language_model", "megatron", **parts)
        self.engine.initialize()

    @property
    def has_outputs(self) -> bool:
        """Whether this rank gets the results; on other ranks :meth:`score` returns zeros."""
        return bool(self.engine.is_mp_src_rank_with_outputs())

    def score(self, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-prob of each token, float32 ``[T]``; that of a sequence's first token is meaningless."""
        with self.engine.eval_mode():
            output = self.engine.infer_batch(_batch(lengths, tokens))
        if not self.has_outputs:
            return torch.zeros(len(tokens))
        following: Tensor = output["model_output"]["log_probs"].values()  # entry t is of token t + 1
        return following.float().cpu().roll(1)

    def gradients(self, lengths: Tensor, tokens: Tensor) -> Mapping[str, Tensor]:
        """Return the gradients of verl's SFT loss on all tokens: this rank's parameters, float32 on the host."""
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            loss = partial(sft_loss, config=None)
            self.engine.forward_backward_batch(_batch(lengths, tokens), loss, forward_only=False)
            found = {
                f"{index}.{name}": parameter.main_grad.detach().float().cpu().clone()
                for index, chunk in enumerate(self.engine.module)
                for name, parameter in chunk.named_parameters()
            }
            self.engine.optimizer_zero_grad()
        return found


def _batch(lengths: Tensor, tokens: Tensor) -> TensorDict:
    """What verl's trainer hands to an engine: jagged ids, the tokens of the loss, the temperature."""
    rows = tokens.split(lengths.tolist())
    scored = [torch.arange(len(row)).sign() for row in rows]
    columns = {
        "input_ids": torch.nested.as_nested_tensor(list(rows), layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(len(row)) for row in rows], layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor(scored, layout=torch.jagged),
        "temperature": torch.ones(len(rows)),
    }
    data = TensorDict(columns, batch_size=len(rows))
    tensordict_utils.assign_non_tensor(
        data,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=TOKENS_PER_MICRO_BATCH,
        calculate_entropy=False,
        global_batch_size=len(rows),
        use_fused_kernels=False,
    )
    return data

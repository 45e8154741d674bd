"""Auxiliary losses of mixtures of experts, on the scale of a loss that is normalised over the mini-batch.

Megatron computes them for each micro-batch as averages over its tokens, and gives every micro-batch of
every data-parallel replica the same weight in the gradient, however few tokens it has. Here a micro-batch's
weight is its share of the update's response tokens. This is added to the loss::

    coefficient * sum over layers of sum over micro-batches of share * auxiliary loss(layer, micro-batch)

with shares that add up to 1 over all replicas. So the coefficient means the same however a mini-batch is
divided. (The value still depends a little on the division: the loss, ``E * sum_i f_i * P_i`` with the
fractions ``f_i`` of a micro-batch's tokens, is not linear.)

Megatron reads the weight from the coefficients in its configuration, which are set for the current micro-batch
within its scope. A recomputation, in which Megatron may compute these losses, uses the same coefficients.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from anytron.config.diagnostics import refuse
from anytron_megatron.checks.experts import balancing_diagnostics
from anytron_megatron.models.release import auxiliary_losses, forget_auxiliary_losses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor, nn

    from anytron.sequences.scopes import ScopeFactory
    from anytron_megatron.training.micro_batch import PreparedBatch

_NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Load-balancing type -> name in Megatron's tracker (megatron/core/transformer/moe/router.py)."""
_Z_LOSS = "z_loss"


class LoadBalancing:
    """Weights a model's auxiliary losses and reports them.

    Raises:
        ConfigError: The type of load-balancing loss is not supported: ``global_aux_loss``, ``sinkhorn``, or
            ``seq_aux_loss`` with packed sequences.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: TransformerConfig, sequence_format: str) -> None:
        kinds, coefficients = _listed(config.moe_router_load_balancing_type), _listed(config.moe_aux_loss_coeff)
        wanted = {kind: value for kind, value in zip(kinds, coefficients, strict=False) if value}
        # mcore-bridge may have read the type from the model's own config, which no check before did.
        refuse(balancing_diagnostics(wanted, sequence_format))
        self._names = [_NAMES[kind] for kind in wanted] + [_Z_LOSS] * bool(config.moe_z_loss_coeff)
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        # Megatron and mcore-bridge copy the configuration for some modules.
        self._configs = list({id(router.config): router.config for router in routers}.values())
        self._device = next(chunks[0].parameters()).device
        self._shared_out = config.sequence_parallel
        self._shards = parallel_state.get_tensor_and_context_parallel_group()
        self._sums: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin an update: reset the sums of losses."""
        self._sums = {}

    def weighting(self, prepared: PreparedBatch) -> ScopeFactory | None:
        """Make the scope in which a micro-batch's auxiliary losses are weighted and recorded.

        None = the micro-batch adds no auxiliary losses: no such loss is configured, or the pass is for scoring only, so
        that the micro-batch has no ``token_shares``.
        """
        if not self._names or prepared.batch.token_shares is None:
            return None
        share = float(prepared.batch.token_shares.sum())
        return partial(self._weighted, share, self._part(prepared), prepared.loss_scale)

    def without(self, prepared: PreparedBatch) -> ScopeFactory | None:
        """Make the scope in which a micro-batch has no auxiliary losses; None = no such loss is configured."""
        return partial(self._weighted, 0.0, self._part(prepared), 0) if self._names else None

    def metrics(self) -> dict[str, float]:
        """Return this replica's part of each loss, averaged over layers. A collective over the ranks of a replica.

        With perfect balance, a load-balancing loss is 1.

        Returns:
            Metrics ``moe/...``, which must be summed over data-parallel replicas.
        """
        reported = {}
        for name in self._names:
            layers = self._sums.get(name)
            total = torch.zeros(2, device=self._device)
            if layers is not None:
                total[0], total[1] = layers.sum(), (layers != 0).sum()
            torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
            # Each layer's loss is a sum over the ranks that share a micro-batch's tokens; one may have none.
            torch.distributed.all_reduce(total[:1], group=self._shards)
            torch.distributed.all_reduce(total[1:], group=self._shards, op=torch.distributed.ReduceOp.MAX)
            reported[f"moe/{name}"] = float(total[0] / total[1].clamp(min=1.0))
        return reported

    def _part(self, prepared: PreparedBatch) -> Tensor:
        """The part of a micro-batch's real tokens that is routed on this rank, above 0."""
        valid = prepared.inputs.layout.valid
        if self._shared_out:
            group = parallel_state.get_tensor_model_parallel_group()
            valid = valid.chunk(group.size(), dim=1)[group.rank()]
        return valid.sum().clamp(min=1e-6) / prepared.batch.num_tokens

    @contextlib.contextmanager
    def _weighted(self, share: float, part: Tensor, loss_scale: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for config in self._configs:
                stack.enter_context(_scaled(config, share * loss_scale, part * self._shards.size()))
            forget_auxiliary_losses()
            yield
            self._note(share, part)

    def _note(self, share: float, part: Tensor) -> None:
        noted = auxiliary_losses()
        for name in self._names:
            if name in noted:
                value = share * noted[name] * (part if name == _Z_LOSS else 1.0)
                self._sums[name] = self._sums[name] + value if name in self._sums else value


@contextlib.contextmanager
def _scaled(config: TransformerConfig, weight: float, z_weight: Tensor) -> Iterator[None]:
    """Multiply a configuration's coefficients for a while; with weight 0 Megatron computes no auxiliary loss.

    Megatron averages the z-loss over each rank's own tokens, and then over the ranks with equal weights.
    ``z_weight`` corrects this: the right weight of the rank, divided by the equal weight.
    """
    balance, z_loss = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    config.moe_aux_loss_coeff = [value * weight for value in balance] if isinstance(balance, list) else balance * weight
    # A coefficient of 0 would make Megatron report 0 / 0.
    config.moe_z_loss_coeff = z_loss * weight * z_weight if z_loss and weight else None
    try:
        yield
    finally:
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = balance, z_loss


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

"""Token log-probabilities and entropies from hidden states, in chunks, vocabulary-parallel.

The logits of a packed micro-batch are by far its largest tensor (16384 tokens x 150 000 entries in
float32: 10 GB), and only two numbers per token are wanted of them. So they are made for a chunk of
tokens at a time, in the forward pass and again in the backward pass, and never kept.

With z the logits divided by the temperature, y the label, p = softmax(z) and E = sum_j p_j z_j::

    log p_y = z_y - logsumexp(z)           d log p_y / d z_j = [j = y] - p_j
    H       = logsumexp(z) - E             d H / d z_j       = -p_j (z_j - E)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from anytron.kernels.contract import LogProbKernel, LogProbSpec


def make_log_prob(spec: LogProbSpec) -> LogProbKernel:
    """Return the neutral default of ``log_prob_kernel``: exact, chunked, in pure torch.

    At no time do more than ``spec.chunk_tokens`` rows of logits exist on a rank. Logits are computed
    in the weight's element type and everything after them in float32.
    """

    def log_prob(
        hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = _ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, temperature, spec.vocab_size, spec.chunk_tokens, group
        )
        return log_probs, entropy

    return log_prob


class _VocabularyShard:
    """This rank's rows of the output layer and the reductions over the ranks that hold the others."""

    def __init__(self, weight: Tensor, vocab_size: int, group: ProcessGroup | None) -> None:
        self.weight = weight
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.start = weight.shape[0] * (dist.get_rank(self.group) if self.group is not None else 0)
        # Megatron pads the vocabulary to a multiple of the tensor-parallel size; those rows are not tokens.
        self.real = max(0, min(weight.shape[0], vocab_size - self.start))

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """float32 ``[n, V / tp]``; -inf in the padding entries."""
        logits = torch.nn.functional.linear(hidden, self.weight).float()
        if temperature != 1.0:
            logits /= temperature
        if self.real < logits.shape[1]:
            logits[:, self.real :] = -torch.inf
        return logits

    def owned(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which labels are this rank's, and their local index (0 where they are not)."""
        local = labels - self.start
        mine = (local >= 0) & (local < self.real)
        return mine, local.masked_fill(~mine, 0)

    def reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values


class _ChunkedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        vocab_size: int,
        chunk_tokens: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        shard = _VocabularyShard(weight, vocab_size, group)
        count = hidden.shape[0]
        log_sum_exp, expected, label_logit = hidden.new_empty((3, count), dtype=torch.float32)
        for begin in range(0, count, chunk_tokens):
            rows = slice(begin, min(begin + chunk_tokens, count))
            logits = shard.logits(hidden[rows], temperature)
            peak = shard.reduce(logits.amax(dim=1), dist.ReduceOp.MAX)
            mine, local = shard.owned(labels[rows])
            picked = logits.gather(1, local[:, None])[:, 0].masked_fill(~mine, 0.0)
            weights = (logits - peak[:, None]).exp_()
            # A padding entry has weight 0 and logit -inf; their product must be 0, not NaN.
            moment = (weights[:, : shard.real] * logits[:, : shard.real]).sum(dim=1)
            total, moment, picked = shard.reduce(torch.stack([weights.sum(dim=1), moment, picked]))
            log_sum_exp[rows] = total.log() + peak
            expected[rows] = moment / total
            label_logit[rows] = picked
        ignored = labels < 0
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp, expected)
        ctx.settings = (temperature, vocab_size, chunk_tokens, group)
        log_probs = (label_logit - log_sum_exp).masked_fill(ignored, 0.0)
        entropy = (log_sum_exp - expected).masked_fill(ignored, 0.0)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sum_exp, expected = ctx.saved_tensors
        temperature, vocab_size, chunk_tokens, group = ctx.settings
        shard = _VocabularyShard(weight, vocab_size, group)
        ignored = labels < 0
        grad_log_probs = grad_log_probs.masked_fill(ignored, 0.0)
        grad_entropy = grad_entropy.masked_fill(ignored, 0.0)
        count = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        # float32, because many chunks are added up.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, count, chunk_tokens):
            rows = slice(begin, min(begin + chunk_tokens, count))
            logits = shard.logits(hidden[rows], temperature)
            probs = (logits - log_sum_exp[rows, None]).exp_()
            logits.sub_(expected[rows, None]).mul_(grad_entropy[rows, None]).add_(grad_log_probs[rows, None])
            logits[:, shard.real :] = 0.0
            grad_logits = probs.mul_(logits).neg_()
            mine, local = shard.owned(labels[rows])
            grad_logits.scatter_add_(1, local[:, None], (grad_log_probs[rows] * mine)[:, None])
            grad_logits = grad_logits.div_(temperature).to(weight.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        grad = grad_weight.to(weight.dtype) if grad_weight is not None else None
        return grad_hidden, grad, None, None, None, None, None

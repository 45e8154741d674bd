"""Kernels that compute right where there is something to compute, and leave the graph where there is nothing."""

from __future__ import annotations

import torch

from anytron.kernels import fused
from anytron.kernels.attention import make_attention
from anytron.kernels.contract import KernelName, zeros_from
from anytron.kernels.log_prob import make_log_prob
from tests.conformance.kernel_mutant import KernelMutant
from tests.conformance.kernel_mutants import replacing


class NothingIsNewZeros(KernelMutant):
    """Leaves the backward pass, as the neutral kernel once did."""

    rule, says = "kernel-no-rows", "The output has no gradient: it does not depend on the operands any more."

    def attention(self, spec):
        attend = make_attention(spec)

        def attended(query, key, value, call):
            nothing = call.cu_seqlens_q is not None and call.cu_seqlens_q[-1] == 0
            return query.new_zeros(*query.shape[:-1], value.shape[-1]) if nothing else attend(query, key, value, call)

        return attended


class NothingForgetsTheKeys(KernelMutant):
    rule, says = "kernel-no-rows", "The gradient of the keys is missing"

    def attention(self, spec):
        attend = make_attention(spec)

        def attended(query, key, value, call):
            nothing = call.cu_seqlens_q is not None and call.cu_seqlens_q[-1] == 0
            shape = (*query.shape[:-1], value.shape[-1])
            return zeros_from(shape, query, value) if nothing else attend(query, key, value, call)

        return attended


class NothingIsScoredApart(KernelMutant):
    rule, says = "kernel-no-rows", "The log-prob has no gradient"

    def log_probs(self, spec):
        score = make_log_prob(spec)

        def scored(hidden, *others):
            return score(hidden, *others) if len(hidden) else (hidden.new_zeros(0, dtype=torch.float32),) * 2

        return scored


class NothingHasNoDecay(KernelMutant):
    rule, says = "kernel-no-rows", "The gradient of the decay is missing"

    @staticmethod
    def run(q, k, v, g, beta, scale, cu_seqlens):
        if cu_seqlens is not None and cu_seqlens[-1] == 0:
            return zeros_from((*q.shape[:-1], v.shape[-1]), q, k, v, beta)
        return fused.gated_delta_rule(q, k, v, g, beta, scale, cu_seqlens)

    fused = replacing(KernelName.GATED_DELTA_RULE, run.__func__)

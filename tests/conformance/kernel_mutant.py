"""A mutant whose kernels are broken."""

from __future__ import annotations

from anytron import hookimpl
from tests.conformance.mutant import Mutant


class KernelMutant(Mutant):
    """Leaves every kernel to the neutral default; a subclass overrides one of the methods without a marker."""

    def attention(self, spec):
        return None

    def mask(self, request):
        return None

    def log_probs(self, spec):
        return None

    def fused(self, name):
        return None

    @hookimpl
    def attention_kernel(self, spec):
        return self.attention(spec)

    @hookimpl
    def build_attn_mask(self, request):
        return self.mask(request)

    @hookimpl
    def log_prob_kernel(self, spec):
        return self.log_probs(spec)

    @hookimpl
    def fused_kernel(self, name):
        return self.fused(name)

"""The processor as a platform whose kernels are broken on purpose."""

from __future__ import annotations

from anytron import hookimpl
from anytron_cpu import CpuPlatform


class BrokenPlatform(CpuPlatform):
    """A base that breaks nothing: subclasses override one of the methods without a marker.

    Attributes:
        rule: Must notice it.
    """

    rule = ""

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


def all_mutants(module):
    """The broken platforms of a module, by name."""
    found = vars(module).values()
    return [one for one in found if isinstance(one, type) and issubclass(one, BrokenPlatform) and one.rule]

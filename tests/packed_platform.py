"""A platform that declares to have packed sequences only, and whose attention kernel raises for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import hookimpl
from anytron.device.platform import Feature, Limit
from anytron_cpu import CpuPlatform
from tests.house import ROOT
from tests.third_party_platform import describe

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from anytron.kernels.contract import AttentionKernel, AttentionSpec


class PackedPlatform(CpuPlatform):
    """The processor, with half of its attention."""

    name = "packed"

    def limits(self) -> Iterable[Limit]:
        return [Limit(Feature.BSHD, "its queue takes no rows")]

    @hookimpl
    def attention_kernel(self, spec: AttentionSpec) -> AttentionKernel:
        from anytron.kernels.attention import make_attention

        attend = make_attention(spec)

        def kernel(query, key, value, call):
            if call.format != "thd":
                raise RuntimeError("packed: no such queue")
            return attend(query, key, value, call)

        return kernel


def install_into(folder: Path) -> list[str]:
    """Write its metadata into a folder; give what has to be on sys.path, or in PYTHONPATH."""
    describe(folder, "anytron-packed", "1.0", "[anytron.platforms]\npacked = tests.packed_platform:PackedPlatform\n")
    return [str(folder), str(ROOT)]

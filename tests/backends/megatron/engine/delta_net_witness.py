"""An extension whose convolution notes which tokens reach it: padding that is kept out arrives as zeros.

With ``DELTA_NET_WITNESS=lie`` its masks call padding real.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from anytron import hookimpl


class DeltaNetWitness:
    name = "delta-net-witness"

    @hookimpl
    def fused_kernel(self, name):
        from anytron.kernels.contract import KernelName
        from anytron.kernels.fused import causal_conv1d

        if name is not KernelName.CAUSAL_CONV1D:
            return None
        log = Path(os.environ["DELTA_NET_WITNESS_LOG"])

        def witness(x, weight, bias, silu, cu_seqlens):
            seen = (x != 0).any(dim=-1).long()
            event = {"rank": int(os.environ["RANK"]), "rows": seen.tolist()}
            with log.open("a") as file:
                file.write(json.dumps(event) + "\n")
            return causal_conv1d(x, weight, bias, silu, cu_seqlens)

        return witness

    @hookimpl
    def build_attn_mask(self, request):
        from anytron.device.loading.neutral import NeutralDefaults

        if os.environ.get("DELTA_NET_WITNESS") != "lie":
            return None
        honest = NeutralDefaults().build_attn_mask(request)
        if honest.linear_attn_mask is None:
            return honest
        return replace(honest, linear_attn_mask=honest.linear_attn_mask.new_ones(honest.linear_attn_mask.shape))

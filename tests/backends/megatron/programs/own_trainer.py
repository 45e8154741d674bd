"""Run examples/own_trainer.py with a kernel that wants values as wide as queries, and leave the layer.

Run as: own_trainer.py EXAMPLES ENGINE. Prints one JSON object.
"""

import json
import sys

import torch

sys.path.insert(0, sys.argv[1])
import own_trainer

from anytron.device.patches import Phase
from anytron.device.platform import Feature, Limit
from anytron.device.stack import open_device_stack

torch.set_num_threads(1)
OWN = (torch.cuda.current_device, torch.cuda.Stream, torch.compile, torch.zeros, torch.Tensor.to)


def attempt(sequence_format):
    return outcome(own_trainer.train, layer, sequence_format, steps=3)


def outcome(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - any failure is the observation
        return f"{type(error).__name__}: {error}"


with open_device_stack("cpu", engine=sys.argv[2]) as layer:
    from megatron.core.tensor_parallel import random as recomputation

    own = (recomputation.checkpoint,)  # in a tuple, as above: the ledger gives modules that hold it the replacement
    from anytron_megatron.own_trainer import join

    join(layer)
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    inner = TEDotProductAttention.forward

    def strict(self, query, key, value, *arguments, packed_seq_params=None, **options):
        if packed_seq_params is not None and query.shape[-1] != value.shape[-1]:
            raise ValueError("values must be as wide as queries")
        return inner(self, query, key, value, *arguments, packed_seq_params=packed_seq_params, **options)

    TEDotProductAttention.forward = strict
    facts = {
        "inside": "transformer_engine" in sys.modules and torch.cuda.current_device is not OWN[0],
        "thd": attempt("thd"),
        "bshd": attempt("bshd"),
        "patched": recomputation.checkpoint is not own[0],
        "again": len(layer.apply_phase(Phase.BEFORE_BUILD)),
    }
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    facts["yarn"] = outcome(lambda: str(YarnRotaryEmbedding(kv_channels=8).inv_freq_extra.device))
    for fraction in (0.0, 0.5):
        weights = [torch.nn.Parameter(torch.ones(2))]
        kinds = {f"{device}_optimizer_cls": torch.optim.SGD for device in ("cpu", "gpu")}
        optimizer = outcome(HybridDeviceOptimizer, weights, offload_fraction=fraction, lr=1.0, **kinds)
        if not isinstance(optimizer, str):
            weights[0].sum().backward()
            optimizer.step()
        facts[f"offload {fraction}"] = optimizer if isinstance(optimizer, str) else weights[0].tolist()
    layer.platform.limits = lambda: [Limit(Feature.BSHD, "it has no rows")]
    facts["without rows"] = {each: attempt(each) for each in ("thd", "bshd")}
    layer.platform.limits = lambda: [Limit(Feature.LATENT_ATTENTION, "its kernels have one width")]
    facts["without MLA"] = attempt("thd")
facts["torch"] = (torch.cuda.current_device, torch.cuda.Stream, torch.compile, torch.zeros, torch.Tensor.to) == OWN
facts["transformer_engine"] = [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
facts["undone"] = recomputation.checkpoint is own[0]
print(json.dumps(facts))

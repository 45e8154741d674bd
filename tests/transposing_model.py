"""A small model whose layers keep weights as vllm-ascend's do, and a worker that updates them as Anytron does.

Experts are transposed after loading (``AscendUnquantizedFusedMoEMethod`` in vllm_ascend/ops/fused_moe/fused_moe.py);
latent attention computes with copies of the parts of a projection (``AscendMLAImpl`` in
vllm_ascend/attention/mla_v1.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

EXPERTS, HIDDEN, INNER = 3, 8, 4
"""``w13_weight`` is square: 2 * INNER = HIDDEN. A shape does not show whether it is transposed."""
HEADS, LATENT, KEYS, VALUES = 2, 5, 3, 4


class Experts(nn.Module):
    """Experts with fused and transposed weights."""

    def __init__(self, quant_method):
        super().__init__()
        self.w13_weight = parameter(self.load, EXPERTS, 2 * INNER, HIDDEN)
        self.w2_weight = parameter(self.load, EXPERTS, HIDDEN, INNER)
        self.quant_method = quant_method

    def load(self, param, loaded_weight, expert, rows):
        param.data[expert, rows].copy_(loaded_weight)

    def forward(self, x):
        gate, up = (x @ self.w13_weight).chunk(2, -1)
        return ((nn.functional.silu(gate) * up) @ self.w2_weight).sum(0)


def transpose_experts(layer):
    """Give the weights of experts the layout of their kernels."""
    for name in ("w13_weight", "w2_weight"):
        turned = getattr(layer, name).data.transpose(1, 2).contiguous()
        setattr(layer, name, nn.Parameter(turned, requires_grad=False))


class Projection(nn.Module):
    """The projection of latent attention that is loaded."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(copy, HEADS * (KEYS + VALUES), LATENT)


class Parts:
    """The parts of a projection with which latent attention computes. Not a module."""

    def __init__(self, projection):
        self.kv_b_proj = projection

    def process_weights_after_loading(self):
        each = self.kv_b_proj.weight.data.view(HEADS, KEYS + VALUES, LATENT)
        keys, values = each[:, :KEYS].contiguous(), each[:, KEYS:].transpose(1, 2).contiguous()
        if hasattr(self, "W_UV"):
            self.W_UV.copy_(values)
            self.W_UK_T.copy_(keys)
        else:
            self.W_UV, self.W_UK_T = values, keys


class Model(nn.Module):
    """Latent attention and experts."""

    def __init__(self, attention, experts):
        super().__init__()
        self.attention, self.experts = attention, experts

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        rows = {"w1": slice(INNER), "w3": slice(INNER, None), "w2": slice(None)}
        for name, tensor in weights:
            if name in own:
                own[name].weight_loader(own[name], tensor)
            else:
                _, expert, part = name.split(".")
                chosen = own[f"experts.{'w2' if part == 'w2' else 'w13'}_weight"]
                chosen.weight_loader(chosen, tensor, int(expert), rows[part])

    def outputs(self, x):
        return self.experts(x), self.attention.impl.W_UK_T, self.attention.impl.W_UV


def build(device="cpu"):
    """Build a model, load it a first time, and return a worker that has it."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from anytron_vllm import transfer

    class TransposeExperts(QuantizeMethodBase):
        create_weights = apply = None

        def process_weights_after_loading(self, layer):
            transpose_experts(layer)

    class Latent(MLAAttention):
        def __init__(self):
            nn.Module.__init__(self)
            self.kv_b_proj = Projection()
            self.impl = Parts(self.kv_b_proj)

        def process_weights_after_loading(self, dtype):
            self.impl.process_weights_after_loading()

    class Worker(transfer.WorkerExtension):
        def __init__(self, model):
            self.vllm_config, self.device, self.model = None, device, model
            self.model_config = SimpleNamespace(dtype=torch.float32)
            self.model_runner = SimpleNamespace(get_model=lambda: model)

        def update(self, weights):
            self.start_anytron_update()
            for name, tensor in weights.items():
                self.load_anytron_weights({name: tensor})
            self.finish_anytron_update()

    with torch.device(device):
        model = Model(Latent(), Experts(TransposeExperts()))
        record_metadata_for_reloading(model)
        model.load_weights(random_weights(0).items())
        model.experts.quant_method.process_weights_after_loading(model.experts)
        model.attention.process_weights_after_loading(torch.float32)
    return Worker(model)


def copy(param, loaded_weight):
    param.data.copy_(loaded_weight)


def parameter(loader, *shape):
    made = nn.Parameter(torch.empty(shape), requires_grad=False)
    made.weight_loader = loader
    return made


def random_weights(seed):
    """Weights by the names and in the layout of a checkpoint."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cpu")

    weights = {"attention.kv_b_proj.weight": draw(HEADS * (KEYS + VALUES), LATENT)}
    for expert in range(EXPERTS):
        weights |= {f"experts.{expert}.{part}": draw(INNER, HIDDEN) for part in ("w1", "w3")}
        weights[f"experts.{expert}.w2"] = draw(HIDDEN, INNER)
    return weights


def difference(model, weights):
    """The largest difference between what a model computes and what its weights define, in float64."""
    x = torch.randn(6, HIDDEN, generator=torch.Generator("cpu").manual_seed(99), device="cpu")
    wanted = torch.zeros(6, HIDDEN, dtype=torch.float64, device="cpu")
    for expert in range(EXPERTS):
        gate, up, down = (weights[f"experts.{expert}.{part}"].double() for part in ("w1", "w3", "w2"))
        wanted += (nn.functional.silu(x.double() @ gate.T) * (x.double() @ up.T)) @ down.T
    each = weights["attention.kv_b_proj.weight"].view(HEADS, KEYS + VALUES, LATENT)
    found = model.outputs(x.to(model.experts.w13_weight.device))
    pairs = zip(found, (wanted, each[:, :KEYS], each[:, KEYS:].transpose(1, 2)), strict=True)
    return max((one.cpu().double() - other.double()).abs().max().item() for one, other in pairs)

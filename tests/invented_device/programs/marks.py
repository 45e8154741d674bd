"""Move a module to the invented device, with and without the redirection; print what its parameters keep."""

import json

import torch
import torch_invented  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

from anytron.base.errors import EngineError
from anytron_accelerator.runtime import make_runtime
from anytron_megatron.models.bridge import _move
from anytron_megatron.redirect import redirect_torch_cuda
from anytron_rollout.transformers_engine import place


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2, bias=False)
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.head.weight = self.inner.weight
        self.inner.weight.sequence_parallel = True
        self.inner.weight.register_hook(lambda gradient: 2 * gradient)


def state(model):
    weight = model.inner.weight
    model.head(model.inner(torch.eye(2, device=weight.device))).sum().backward()
    once = torch.ones(2, 2) @ weight.detach().cpu() + weight.detach().cpu() @ torch.ones(2, 2)
    return {
        "device": weight.device.type,
        "mark": getattr(weight, "sequence_parallel", None),
        "tied": model.head.weight is weight,
        "hook": bool(torch.allclose(weight.grad.cpu(), 2 * once.T, atol=1e-5)),
    }


runtime = make_runtime("invented", "")
print(json.dumps(state(Tied().to("invented"))))
try:
    _move(Tied(), torch.device("invented"))
except EngineError as error:
    print(json.dumps(str(error)))
undo = redirect_torch_cuda(runtime)
print(json.dumps(state(Tied().cuda())))
print(json.dumps(state(Tied().cpu().to("invented"))))
model = Tied()
_move(model, torch.device("invented"))
print(json.dumps(state(model)))
undo()
print(json.dumps(state(Tied().to("invented"))))

# The rollout engine's process has no redirection.
config = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    tie_word_embeddings=True,
)
model = place(LlamaForCausalLM(config), runtime, None)
print(json.dumps(model.lm_head.weight is model.model.embed_tokens.weight))

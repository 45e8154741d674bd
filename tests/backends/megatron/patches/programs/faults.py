"""Three faults of Megatron, without and with their patches. Run as: python faults.py DIRECTORY. Prints JSON."""

import json
import sys
from pathlib import Path

import torch

from anytron.hooks.types import PatchContext
from anytron.patches import Ledger, Phase
from anytron.plugins import hooks_of
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches


class Host(CpuPlatform):
    """The processor, without any Transformer Engine."""

    portable_modules = False


def attempt(function):
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - any failure is the observation
        return f"{type(error).__name__}: {error}"


def patches(phase, context):
    """Without mcore-bridge: it cannot be imported without a Transformer Engine."""
    return [patch for patch in trainer_patches(phase, context) if patch.package != "mcore-bridge"]


def gate():
    """A router's scores of 3 tokens for 2 experts against the definition."""
    from megatron.core.transformer.moe import moe_utils

    linear = getattr(moe_utils, "router_gating_linear", None)
    if linear is None:
        return "this version computes scores another way"
    tokens, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    bias = (None,) if linear.__code__.co_argcount == 4 else ()  # from 0.15 on
    scores = linear(tokens, weight, *bias, torch.float32)
    scores.sum().backward()
    torch.testing.assert_close(scores, tokens @ weight.T)
    torch.testing.assert_close(tokens.grad, weight.sum(0).expand(3, 4).detach())
    return "ok"


def save(directory):
    """A sharded tensor there and back."""
    from megatron.core import dist_checkpointing

    tensor = torch.arange(6.0).view(2, 3)
    directory.mkdir()
    dist_checkpointing.save({"a": dist_checkpointing.ShardedTensor.from_rank_offsets("a", tensor)}, str(directory))
    empty = {"a": dist_checkpointing.ShardedTensor.from_rank_offsets("a", torch.zeros(2, 3))}
    torch.testing.assert_close(dist_checkpointing.load(empty, str(directory))["a"], tensor)
    return "ok"


def score(mtp_layers):
    """Logits of a model, without labels."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, mtp_num_layers=mtp_layers or None)
    layer = get_gpt_layer_local_spec()
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if mtp_layers else None
    torch.manual_seed(0)
    model = GPTModel(config, layer, 24, 16, position_embedding_type="rope", mtp_block_spec=mtp).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.manual_seed(len(name))
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    ids = torch.arange(6)[None]
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    logits = model(ids, ids, mask)
    assert model.config is config
    return logits


def mtp():
    torch.testing.assert_close(score(1), score(0))
    return "ok"


def main():
    torch.set_num_threads(1)
    context = PatchContext(Host(), "trainer", hooks_of(), "megatron")
    ledger = Ledger()
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, patches(phase, context))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    directory = Path(sys.argv[1])
    facts = {}
    for name in ("unpatched", "patched"):
        if name == "patched":
            ledger.apply(Phase.BEFORE_BUILD, patches(Phase.BEFORE_BUILD, context))
        saved = attempt(lambda name=name: save(directory / name))
        facts[name] = {"router": attempt(gate), "checkpoint": saved, "mtp": attempt(mtp)}
    facts["report"] = ledger.report()
    ledger.undo()
    print(json.dumps(facts))


if __name__ == "__main__":  # saving starts processes
    main()

"""A Megatron model of portable modules with LoRA, and peft, accelerate and transformers in the same process.

Arguments: model directory (with ``expected.pt``), ``first`` or ``last``: when the three are imported.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import open_session
from anytron.device.patches import Ledger, Phase

NEIGHBOURS = ("transformers", "accelerate", "peft")


def import_neighbours():
    for name in NEIGHBOURS:
        importlib.import_module(name)


def build(folder):
    session = open_session(platform="cpu")
    context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, session.hooks.patch_model(phase, context))
    torch.set_num_threads(1)
    from anytron_megatron.models.bridge import BridgeSource
    from anytron_megatron.training.parallel import initialize

    initialize(session.platform.runtime(), ParallelSizes(), seed=1, timeout_s=60)
    bridge = BridgeSource(
        folder,
        dtype=torch.float32,
        sizes=ParallelSizes(),
        recompute="none",
        deterministic=False,
        predicts_ahead=False,
        transformer={},
    )
    return bridge.build(torch.device("cpu"))[0]


def check_probes():
    """Nobody takes the portable modules for Transformer Engine, though the name can be imported."""
    from accelerate.utils import convert_model, has_transformer_engine_layers, imports
    from peft import import_utils
    from peft.tuners.lora import te
    from peft.utils import quantization_utils

    assert importlib.util.find_spec("transformer_engine") is not None
    assert not imports.is_transformer_engine_available()
    assert not imports.is_transformer_engine_mxfp8_available()
    assert not imports.is_fp8_available() or imports.is_torchao_available()
    assert not import_utils.is_te_available()
    assert not import_utils.is_te_pytorch_available()
    assert not te.is_te_pytorch_available()
    assert not quantization_utils.is_te_pytorch_available()
    for convert in (has_transformer_engine_layers, convert_model):
        with pytest.raises(ImportError, match="transformer_engine"):
            convert(torch.nn.Linear(16, 16))


def check_lora(model, ids, positions, logits):
    """mcore-bridge's LoRA on the portable layers: starts as nothing, learns, can be merged and switched off."""
    from mcore_bridge.tuners.lora import LoraParallelLinear
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.te import TeLinear

    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=True))
    adapted = [module for module in wrapped.modules() if isinstance(module, LoraParallelLinear)]
    assert len(adapted) == 4 * 2
    assert not any(isinstance(module, TeLinear) for module in wrapped.modules())
    inner = wrapped.base_model.model
    torch.testing.assert_close(inner(ids, positions, None), logits)

    inner(ids, positions, None).float().square().sum().backward()
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
        changed = inner(ids, positions, None)
        assert not torch.allclose(changed, logits, atol=1e-3)
        wrapped.merge_adapter()
        torch.testing.assert_close(inner(ids, positions, None), changed)
        wrapped.unmerge_adapter()
        torch.testing.assert_close(inner(ids, positions, None), changed)
        with wrapped.disable_adapter():
            torch.testing.assert_close(inner(ids, positions, None), logits)


def check_neighbours():
    """Their own work goes on: LoRA and training of a Hugging Face model under accelerate."""
    import accelerate
    import peft
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    hugging_face = transformers.Qwen3ForCausalLM(config)
    model = peft.get_peft_model(hugging_face, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.tensor([[1, 2, 3]])).logits.sum())
    optimizer.step()
    merged = accelerator.unwrap_model(model).merge_and_unload()
    assert isinstance(merged.model.layers[0].self_attn.q_proj, torch.nn.Linear)


def main(folder, order):
    if order == "first":
        import_neighbours()
    model = build(folder)
    import_neighbours()
    check_probes()
    ids = torch.load(folder / "expected.pt")["ids"]
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    with torch.no_grad():
        logits = model(ids, positions, None)
    check_lora(model, ids, positions, logits)
    check_neighbours()
    print("fine")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

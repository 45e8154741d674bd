"""Training state leaves the device and comes back, and nobody can tell from what is trained."""

import pytest
import torch
from safetensors.torch import load_file

from anytron_megatron.training.memory import release_memory

SECTIONS = {
    "bfloat16": {"model": {"dtype": "bfloat16"}, "engine": {"distributed_optimizer": False}},
    "sharded": {"engine": {"distributed_optimizer": True}, "parallel": {"data_parallel_size": 2}},
}


def trained(start_engine, recorded, policy_loss, parts, **sections):
    """Three updates with Adam, offloading before each; what was trained, what the scores were, and the memory."""
    sections["engine"] = {**sections.get("engine", {}), "offload": parts}
    sections |= {"optimizer": {"name": "adam", "lr": 1e-3}, "algorithm": {"kl_coefficient": 0.1}}
    with start_engine(**sections) as (workers, updates, output):
        found, memory = [], []
        for number in range(3):
            memory.append(workers.offload())
            workers.export_weights(str(output / f"{number}.safetensors"))
            found.append(workers.score(recorded, updates, "reference"))
            found.append(torch.tensor(list(workers.update(recorded, updates, policy_loss).values())))
        workers.export_weights(str(output / "after.safetensors"))
        found += [tensor for file in sorted(output.iterdir()) for tensor in load_file(file).values()]
    return found, memory


@pytest.mark.some(1)
@pytest.mark.parametrize("case", SECTIONS)
def test_what_is_offloaded_between_updates_changes_no_bit(start_engine, recorded, policy_loss, tiny_model, case):
    sections = SECTIONS[case]
    plain, nothing = trained(start_engine, recorded, policy_loss, [], **sections)
    found, memory = trained(start_engine, recorded, policy_loss, ["optimizer", "gradients", "reference"], **sections)
    assert len(found) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert [one["memory/offloaded_bytes"] for one in nothing] == [0, 0, 0]

    weights = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    before, *after = [one["memory/offloaded_bytes"] for one in memory]
    element = 2 if case == "bfloat16" else 4
    replicas = 2 if case == "sharded" else 1
    # Gradients in float32 and the reference, on each replica; float32 copies, where the model has others.
    expected = replicas * weights * (4 + element) + (weights * 4 if case == "bfloat16" else 0)
    assert before == pytest.approx(expected, rel=0.05)
    # And after the first update two moments, which replicas share.
    assert after == pytest.approx([expected + weights * 8] * 2, rel=0.05)


def test_a_model_that_is_released_takes_no_activation_function_of_others_along():
    """transformers has one module of it for all models of a process."""
    from transformers.activations import gelu_pytorch_tanh

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), gelu_pytorch_tanh)
    linear = model[0]
    release_memory([model])
    assert vars(model) == vars(linear) == {}
    torch.testing.assert_close(gelu_pytorch_tanh(torch.zeros(2)), torch.zeros(2))

"""The gradients of supervised fine-tuning are Hugging Face's, however its examples are spread over ranks.

Expected ones come of Hugging Face's model in float64, which computes its loss of padded ``labels`` by itself.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from anytron.algorithms.losses import SupervisedLoss
from anytron.run.trainer.updates import UpdatePlan
from tests.backends.megatron.engine.test_algorithms import LAYOUTS

PP2 = {"parallel": {"pipeline_model_parallel_size": 2}}


@pytest.fixture(scope="module")
def expected(tiny_model, recorded):
    """The loss and its gradients by parameter."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    lengths = recorded.lengths.tolist()
    tokens = pad_sequence(list(recorded.tokens.split(lengths)), batch_first=True)
    labels = recorded.tokens.where(recorded.response_mask, -100)
    labels = pad_sequence(list(labels.split(lengths)), batch_first=True, padding_value=-100)
    real = torch.arange(tokens.shape[1]) < recorded.lengths[:, None]
    loss = model(tokens, attention_mask=real.long(), labels=labels).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.float() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def mini_batch(recorded):
    (planned,) = UpdatePlan(1, 1, "token-mean", 24).mini_batches(recorded, seed=0)
    return planned.batch


@pytest.mark.some(3)
@pytest.mark.parametrize("layout", [*LAYOUTS, "pp2"])
def test_loss_and_gradients_are_hugging_faces_in_every_layout(layout, start_engine, expected, mini_batch):
    loss, right = expected
    with start_engine(**LAYOUTS.get(layout, PP2)) as (workers, plan, output):
        file = output / "gradients.safetensors"
        workers.export_gradients(str(file), mini_batch, plan, SupervisedLoss())
        metrics = workers.update(mini_batch, plan, SupervisedLoss())
        log_probs = workers.score(mini_batch, plan, "policy")
    gradients = load_file(file)
    assert gradients.keys() == right.keys()
    differences = {name: float((gradients[name] - one).abs().max() / one.abs().max()) for name, one in right.items()}
    assert max(differences.values()) < 2e-4, differences
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss/nll"] == pytest.approx(loss, rel=1e-5)
    norm = torch.stack([one.norm() for one in right.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    # One update has moved the weights: the loss of the same examples is another one.
    after = -log_probs[mini_batch.response_mask].mean().item()
    assert after != pytest.approx(loss, rel=1e-6)
    assert after < loss

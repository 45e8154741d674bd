"""Qwen3-VL-MoE: weights of experts are read as published and as transformers 5 writes them, and saved as published."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.backends.megatron.families.layouts import PUBLISHED_MODELS
from tests.backends.megatron.families.observe import largest

pytestmark = pytest.mark.families

(QWEN3_VL_MOE,) = (model for model in PUBLISHED_MODELS if model.name == "qwen3_vl_moe")
EXPERT = "model.language_model.layers.0.mlp.experts.gate_up_proj"
SIZES = {"hidden_size": 64, "moe_intermediate_size": 48}
EP2 = {"data_parallel_size": 2, "expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def published(tiny_family):
    return tiny_family(QWEN3_VL_MOE.name)


@pytest.fixture(scope="module")
def by_transformers(published, tmp_path_factory):
    """The same model as transformers saves it."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    AutoModelForImageTextToText.from_pretrained(published, dtype=torch.float32).save_pretrained(directory)
    return directory


def test_transformers_writes_them_the_other_way_round_and_reads_both(published, by_transformers):
    one, other = (load_file(folder / "model.safetensors")[EXPERT] for folder in (published, by_transformers))
    assert one.shape == (4, SIZES["hidden_size"], 2 * SIZES["moe_intermediate_size"])
    assert torch.equal(one, other.mT)
    text = AutoConfig.from_pretrained(by_transformers).text_config
    assert {name: getattr(text, name) for name in SIZES} == SIZES


@pytest.mark.parametrize("parallel", [{}, EP2], ids=["one rank", "EP2"])
@pytest.mark.parametrize("form", ["published", "by_transformers"])
def test_both_are_read_and_the_published_form_is_saved(form, parallel, request, ranks, published, truth_of, tmp_path):
    truth = truth_of(QWEN3_VL_MOE)
    workers, _ = ranks.engine(request.getfixturevalue(form), parallel=parallel)
    assert largest(workers.logits(truth.batch) - truth.logits) <= 1e-5
    workers.save_hf(str(tmp_path / "hf"))
    saved = load_file(tmp_path / "hf/model.safetensors")
    assert saved.keys() == truth.checkpoint.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in truth.checkpoint.items())
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").state_dict()
    first = AutoModelForImageTextToText.from_pretrained(published).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_without_the_patch_a_file_of_transformers_is_read_wrongly_without_an_error(
    ranks, by_transformers, truth_of, write_extension
):
    write_extension(
        "anytron_megatron.patches.models:_Oriented.load", "lambda original: lambda self: self._tensor.load()"
    )
    truth = truth_of(QWEN3_VL_MOE)
    workers, _ = ranks.engine(by_transformers)
    assert largest(workers.logits(truth.batch) - truth.logits) > 1e-2

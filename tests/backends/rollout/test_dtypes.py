"""The model has the types that transformers gives it when it reads a checkpoint."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from anytron.task.data.model_files import as_known
from anytron.task.data.pretrained import model_class
from anytron_conformance.tiny_models import CONFIGS
from anytron_rollout.generation import build_model
from tests.backends.megatron.families.published import PUBLISHED

FAMILIES = {**CONFIGS, **PUBLISHED}


def config_of(family):
    return AutoConfig.for_model(**as_known(FAMILIES[family]))


def types(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: str(tensor.dtype) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_has_the_type_that_it_would_have_from_a_file(family, dtype, tmp_path):
    config = config_of(family)
    build_model(config, torch.float32).save_pretrained(tmp_path)

    read = model_class(config).from_pretrained(tmp_path, dtype=dtype)

    # transformers forgets the biases of MiniMax-M2, which are float32 in training.
    biases = dict.fromkeys((name for name in types(read) if "e_score_correction_bias" in name), "torch.float32")
    assert types(build_model(config, dtype)) == types(read) | biases

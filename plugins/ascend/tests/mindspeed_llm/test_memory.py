"""The estimate of memory for the engine ``mindspeed_llm``, which needs no MindSpeed-LLM."""

import pytest
import torch
from transformers import AutoConfig

from anytron.proof.doctor import devices
from anytron.proof.doctor.subject import look
from anytron.task.data.pretrained import model_class
from anytron_ascend.mindspeed_llm.arguments import FAMILIES, WITH_EXPERTS
from anytron_conformance.tiny_models import CONFIGS

RANK = "memory.training-rank."
PARTS = {"parameters", "gradients", "optimizer", "activations", "log-probs"}


class Device:
    """Has room for everything; in place of the process that would ask an NPU."""

    def ask(self, probe):
        assert probe == "devices"
        return {"count": 1, "devices": [{"name": "a chip", "total": 1 << 40}], "type": "npu"}


@pytest.fixture
def estimated(monkeypatch, request, tiny_family):
    """What doctor says of the memory of a run with a tiny model, by the entry's name."""
    monkeypatch.setenv("ANYTRON_PLATFORM", "ascend")

    def examine(family, *overrides):
        asked = ["engine.name=mindspeed_llm", f"model.path={tiny_family(family)}", "model.config=null", *overrides]
        subject = look(request.config.rootpath / "examples/grpo_sort.yaml", asked)
        return {entry.name.removeprefix(RANK): entry for entry in devices.examine_memory(subject, Device())}

    return examine


@pytest.mark.parametrize("family", sorted(CONFIGS.keys() & {*FAMILIES, "qwen2_5"}))
def test_the_parameters_are_those_of_transformers(family, estimated):
    fields = dict(CONFIGS[family])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).from_config(config).parameters())
    for dtype, element in (("float32", 4), ("bfloat16", 2)):
        found = estimated(family, f"model.dtype={dtype}")
        assert f"{count:,} numbers of {dtype}" in found["parameters"].detail
        assert f"{count * element / 2**20:.2f} MiB" in found["parameters"].detail
        assert {name for name in PARTS if found[name].status == "passed"} == PARTS
        assert found["memory.training"].status == "passed"


def test_experts_are_divided_among_their_ranks(estimated):
    (family,) = WITH_EXPERTS
    counts = []
    for overrides in ((), ("parallel.data_parallel_size=2", "parallel.expert_model_parallel_size=2")):
        detail = estimated(family, *overrides)["parameters"].detail
        counts.append(int(detail.split(": ")[1].split(" ")[0].replace(",", "")))
    config = CONFIGS[family]
    experts = 3 * config["hidden_size"] * config["moe_intermediate_size"] * config["num_experts"]
    assert counts[0] - counts[1] == config["num_hidden_layers"] * experts // 2


@pytest.mark.parametrize(
    "option", ["recompute.method=block", "recompute.num_layers=2", "recompute.activation_function=true"]
)
def test_recomputation_that_is_not_counted_is_said(estimated, option):
    name = option.partition("=")[0]
    recompute = () if name.endswith("function") else ("engine.recompute=full",)
    found = estimated("qwen3", *recompute, f"engine.options.{option}")
    assert found.keys() == {"memory.training"}
    assert found["memory.training"].status == "warning"
    assert f"engine.options.{name}: " in found["memory.training"].detail
    assert "engine.recompute=none" in found["memory.training"].fix

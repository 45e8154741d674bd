"""A critic's values and the gradient of each of its parameters are transformers', in every layout; faults are named."""

from __future__ import annotations

import pytest

from anytron.proof.verification.roles import check_value_gradients, check_values, write_critic

TP2, PP2, DP2 = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "pipeline_model", "data"))
CASES = {
    "qwen3": ("qwen3", {}),
    "qwen3_tied, bshd, pp2": ("qwen3_tied", {"parallel": PP2, "engine": {"sequence_format": "bshd"}}),
    "qwen3, tp2": ("qwen3", {"parallel": TP2}),
    "qwen3, tp2, no sequence parallelism": ("qwen3", {"parallel": {**TP2, "sequence_parallel": False}}),
    "qwen3, cp2": ("qwen3", {"parallel": {"context_parallel_size": 2}}),
    "qwen3, dp2, sharded optimizer": (
        "qwen3",
        {"parallel": DP2, "optimizer": {"name": "adam"}, "engine": {"distributed_optimizer": True}},
    ),
    "qwen3_moe, balanced": (
        "qwen3_moe",
        {"engine": {"options": {"transformer": {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 1.0}}}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3, bfloat16": ("qwen3", {"model": {"dtype": "bfloat16"}}),
}


@pytest.fixture
def compare(ranks, tiny_family, recorded, tmp_path):
    """Make both checks of an engine's critic."""

    def check(family="qwen3", **sections):
        model = tiny_family(family)
        write_critic(model, tmp_path / "critic")
        critic = {"path": str(tmp_path / "critic")}
        workers, config = ranks.engine(model, critic=critic, algorithm={"advantage": "gae"}, **sections)
        return (
            check_values("critic-values", config, workers, recorded),
            check_value_gradients("critic-gradients", config, workers, recorded),
        )

    return check


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_hugging_face(case, compare):
    family, sections = CASES[case]
    for found in compare(family, **sections):
        assert found.status == "passed", found
        assert found.difference > 0.0, found  # two computations that share nothing are never equal
        assert "not compared" not in found.detail


SABOTEUR = """
from anytron import hookimpl


class Plugin:
    name = "sabotage"

    @hookimpl
    def postprocess_output(self, values, layout):
        flat = layout.unpack(values)
        return {answer} if flat.shape[-1] == 1 else flat
"""


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("flat.detach() + 0.5 * (flat - flat.detach())", "value_head.weight, which is 0.5 times Hugging Face's"),
        ("flat.detach().requires_grad_()", "no gradient reaches any parameter"),
    ],
    ids=["half", "none"],
)
def test_values_without_their_gradient_are_noticed(answer, said, install_plugin, compare):
    install_plugin(SABOTEUR.format(answer=answer))
    values, gradients = compare()
    assert values.status == "passed", values
    assert gradients.status == "failed", gradients
    assert said in gradients.detail


@pytest.mark.slow
def test_values_that_are_not_negative_are_noticed(install_plugin, compare):
    install_plugin(SABOTEUR.format(answer="flat.clamp(min=0.0)"))
    values, _ = compare()
    assert values.status == "failed", values
    assert values.difference > 0.1


@pytest.mark.slow
def test_an_export_that_is_not_what_was_loaded_is_noticed(write_extension, compare):
    write_extension(
        "anytron_megatron.models.bridge:BridgeSource.export",
        "lambda original: lambda self, *arguments, **options:"
        " ((name, tensor.flip(0)) for name, tensor in original(self, *arguments, **options))",
    )
    values, _ = compare()
    assert values.status == "failed", values
    assert values.detail.startswith("the critic exports other weights than it was built with: ")

"""What prediction modules add to an update is what their definition gives, in every layout; faults are named."""

from __future__ import annotations

import pytest

from anytron.proof.verification.prediction import check_prediction, trains_modules
from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules, write_tiny_model

CASES = {
    "detached, two depths": {"mtp_detach": True},
    "attached": {"mtp_detach": False},
    "attached, tp2": {"mtp_detach": False, "parallel": {"tensor_model_parallel_size": 2}},
    "attached, two depths, pp2": {"mtp_detach": False, "parallel": {"pipeline_model_parallel_size": 2}},
}


@pytest.fixture
def engine(ranks, tmp_path):
    """Build an engine of a tiny DeepSeek-V3 with modules."""

    def build(depths=1, *, mtp_detach, **sections):
        model = write_tiny_model("deepseek_v3", tmp_path / "model")
        turn_last_layers_into_prediction_modules(model, depths)
        options = {
            "mtp_loss_coefficient": 0.3,
            "mtp_detach": mtp_detach,
            # Balance is no part of what is compared.
            "transformer": {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "aux_loss"},
        }
        return ranks.engine(model, engine={"options": options}, **sections)

    return build


def with_options(config, **changes):
    """The run as it would be with other options of its engine."""
    options = {**config.engine.options, **changes}
    return config.model_copy(update={"engine": config.engine.model_copy(update={"options": options})})


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_definition_gives(case, engine, recorded):
    workers, config = engine(2 if "two" in case else 1, **CASES[case])
    assert trains_modules(config)
    found = check_prediction("multi-token-prediction", config, workers, recorded)
    assert found.status == "passed", found
    assert found.difference > 0.0


@pytest.mark.parametrize(
    ("built", "run", "said"),
    [
        (True, {"mtp_detach": False}, "the first is lm_head.weight, which is zero"),
        (False, {"mtp_detach": True}, "the first is lm_head.weight, which is off by"),
        (True, {"mtp_loss_coefficient": 0.6}, "which is 0.5 times the definition's"),
    ],
    ids=["reaches-too-little", "reaches-too-much", "half-of-its-weight"],
)
def test_another_gradient_is_noticed(built, run, said, engine, recorded):
    workers, config = engine(mtp_detach=built)
    found = check_prediction("multi-token-prediction", with_options(config, **run), workers, recorded)
    assert found.status == "failed", found
    assert said in found.detail


@pytest.mark.slow
def test_a_loss_that_is_reported_wrongly_is_noticed(write_extension, engine, recorded):
    write_extension(
        "anytron_megatron.training.trained_model:forward_backward",
        "lambda original: lambda *arguments: [{**part, 'mtp/loss': 1.1 * part['mtp/loss']} if part else part"
        " for part in original(*arguments)]",
    )
    workers, config = engine(mtp_detach=True)
    found = check_prediction("multi-token-prediction", config, workers, recorded)
    assert found.status == "failed", found
    assert "the modules' loss is" in found.detail


def test_a_run_without_the_option_trains_none(ranks, tiny_family):
    _, config = ranks.engine(tiny_family("deepseek_v3"))
    assert not trains_modules(config)

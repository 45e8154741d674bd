"""verl's own workers on simulated NPUs, with the real torch_npu (tox -e verl-ascend)."""

from __future__ import annotations

import pytest
import torch

from plugins.verl.tests.expected import REPLACED, of_transformers, replaced_in, responses

pytestmark = pytest.mark.npu_simulator
FORMATS = ("thd", "bshd")


@pytest.fixture(scope="module")
def found(model, ranks, tmp_path_factory):
    """What a script that names only verl finds on a platform, by format; with two ranks, by what they share.

    To it comes what Anytron says that it has replaced, by rank.
    """
    known = {}

    def of(platform, sequence_format, **shared):
        key = (platform, sequence_format, *shared)
        if key not in known:
            program = ("simulated.py", "user.py", model, sequence_format, "float32")
            report = tmp_path_factory.mktemp("report")
            variables = {"ANYTRON_PLATFORM": platform, "ANYTRON_VERL_REPORT": str(report), **shared}
            known[key] = {**ranks(*program, **variables), "replaced": replaced_in(report)}
        return known[key]

    return of


@pytest.mark.parametrize("sequence_format", FORMATS)
def test_log_probs_are_those_of_transformers(model, found, sequence_format):
    on_npu = found("ascend", sequence_format)
    assert on_npu["engine"] == "LanguageModelEngine"
    torch.testing.assert_close(responses(on_npu["log_probs"]), of_transformers(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sequence_format", FORMATS)
def test_steps_are_the_processors(found, sequence_format):
    same(found("ascend", sequence_format), found("cpu", sequence_format))


@pytest.mark.parametrize("sequence_format", FORMATS)
def test_where_verl_sees_an_npu_its_branches_are_replaced(found, sequence_format):
    on_npu = found("ascend", sequence_format)
    assert on_npu["is_npu_available"]
    assert on_npu["replaced"] == [REPLACED]


@pytest.mark.parametrize("dimension", ["tensor", "context"])
def test_two_npus_do_what_one_processor_does(found, dimension):
    same(found("ascend", "thd", **{dimension: 2}), found("cpu", "thd"))


def same(on_npu, on_processor):
    for algorithm in ("ppo", "grpo"):
        assert on_npu[algorithm] == pytest.approx(on_processor[algorithm], rel=1e-3, abs=1e-5)
    torch.testing.assert_close(responses(on_npu["after"]), responses(on_processor["after"]), atol=1e-3, rtol=0)

"""What ``anytron verify`` says about a family that no test proves."""

from __future__ import annotations

from pathlib import Path

import pytest

from anytron.base.results import Result
from anytron.base.version import ISSUES
from anytron.cli.checks import run_verification
from anytron.config.load import load_config
from anytron.proof.checks import Report
from anytron_megatron.checks.proposal import _TRIED, proposal
from anytron_megatron.models.families import COLUMNS, FAMILIES, Family

ROOT = Path(__file__).parents[4]
DENSE, EXPERTS = ROOT / "examples" / "grpo_sort.yaml", ROOT / "examples" / "grpo_moe.yaml"
IMAGES = ROOT / "examples" / "grpo_count_shapes.yaml"
COMPARED = ("export-equals-import", "hf-logits", "hf-log-probs", "hf-gradients", "rollout-equals-training")


def report(*more: str, failed: str = "", skipped: str = "") -> Report:
    """A report in which the checks of every run passed, and ``more``."""
    statuses = dict.fromkeys((*COMPARED, *more), "passed")
    statuses |= {failed: "failed"} if failed else {}
    statuses |= {skipped: "skipped"} if skipped else {}
    return Report([Result(name, status) for name, status in statuses.items()])


@pytest.fixture
def unproven(monkeypatch) -> None:
    """Make the families of the examples such that no test proves them."""
    for name in ("qwen3", "qwen3_moe"):
        monkeypatch.setitem(FAMILIES, name, Family(name, rotates_whole_heads=True))


def row_of(lines: list[str]) -> Family:
    (row,) = [line.strip() for line in lines if line.strip().startswith("Family(")]
    return eval(row, {"Family": Family})


def proposed(example: Path, overrides: list[str], found: Report) -> Family:
    return row_of([*proposal(load_config(example, overrides), found)])


def test_nothing_is_said_of_a_proven_family():
    assert [*proposal(load_config(DENSE), report())] == []


@pytest.mark.usefixtures("unproven")
def test_the_row_claims_what_the_checks_tried():
    assert proposed(DENSE, [], report()).proof == ("thd",)
    assert proposed(DENSE, ["engine.sequence_format=bshd"], report()).proof == ("bshd",)
    row = proposed(DENSE, ["parallel.tensor_model_parallel_size=2"], report("packed-equals-padded"))
    assert row == Family("qwen3", "qwen3", ("thd", "bshd", "TP"), rotates_whole_heads=True)
    assert "LoRA" in proposed(DENSE, ["model.lora={}"], report("adapters-equal-merged")).proof
    assert "LoRA" not in proposed(DENSE, ["model.lora={}"], report()).proof
    assert "cache" in proposed(DENSE, ["rollout.engine=megatron"], report()).proof
    assert "cache" not in proposed(DENSE, ["rollout.engine=megatron"], report(skipped=COMPARED[-1])).proof


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("column", _TRIED)
def test_what_was_not_tried_is_tried_by_the_override_that_the_message_names(column):
    one_rank = ["parallel.data_parallel_size=1", "parallel.expert_model_parallel_size=1"]
    lines = [*proposal(load_config(EXPERTS, one_rank), report())]
    named = next(line for line in lines if line.startswith("Not tried: "))
    assert (f"{column} ({_TRIED[column]})" in named) == (column != "thd")
    made = {"LoRA": "adapters-equal-merged"}.get(column, "optimizer-update")
    assert column in proposed(EXPERTS, _TRIED[column].split(), report(made)).proof
    assert column in COLUMNS


def test_the_message_names_the_file_with_models_of_the_same_kind(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen3", Family("qwen3"))
    monkeypatch.setitem(FAMILIES, "qwen2_5_vl", Family("qwen2_5_vl"))
    for example, file in ((DENSE, "published_text.py"), (IMAGES, "published_images.py")):
        assert f"families/{file}," in [*proposal(load_config(example), report())][-1]
        assert (ROOT / "tests/backends/megatron/families" / file).is_file()


@pytest.mark.usefixtures("unproven")
def test_a_dense_model_is_not_asked_for_a_split_of_experts():
    assert not any("EP (" in line for line in proposal(load_config(DENSE), report()))


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (report(failed="hf-gradients"), "(failed: hf-gradients)"),
        (report(skipped="hf-logits"), "(skipped: hf-logits)"),
        (report(failed="other", skipped="hf-logits"), "(failed: other; skipped: hf-logits)"),
    ],
)
def test_no_row_is_proposed_without_the_comparisons_with_transformers(found, reason):
    lines = [*proposal(load_config(DENSE), found)]
    assert not any("Family(" in line for line in lines)
    assert reason in lines[-1]
    assert ISSUES in lines[-1]


def test_the_tracker_is_the_one_of_the_distribution():
    assert f'Issues = "{ISSUES}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("unproven")
def test_a_verification_ends_with_the_row(capsys):
    assert run_verification(DENSE, [], as_json=False)
    shown = capsys.readouterr().out
    lines = shown[shown.index("0 failed") :].splitlines()
    assert row_of(lines).proof == ("thd", "bshd")
    assert any(line.endswith("tox -e families -- -k qwen3") for line in lines)

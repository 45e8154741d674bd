"""What a run would do, before it does it."""

import pytest

from anytron.device.patches import Ledger, Outcome, Patch, Phase, Supersession, Verdict, plan
from anytron.device.patches.plan import installed_version
from tests.core.device.patches.named import named


def make(**fields):
    values = {"id": "p", "owner": "us", "target": "victim:Shop.sell", "phase": Phase.BEFORE_BUILD, "reason": "why"}
    return Patch(**{**values, "replacement": named(lambda _original: lambda _self: "cake"), **fields})


def test_the_verdict_names_the_version_that_decided(victim):
    version = installed_version("pluggy")
    affected, cured, absent, always = plan([
        make(package="pluggy", requires=">=1"),
        make(package="pluggy", requires="<0.1"),
        make(package="no-such-package", requires="<1"),
        make(),
    ])  # fmt: skip
    assert (affected.verdict, affected.why) == (Verdict.APPLIES, f"pluggy {version} is in >=1")
    assert (cured.verdict, cured.why) == (Verdict.SKIPPED, f"pluggy {version} is outside of <0.1")
    assert (absent.verdict, absent.why) == (Verdict.SKIPPED, "no-such-package is not installed")
    assert (always.verdict, always.why) == (Verdict.APPLIES, "the patch applies to every version")


def superseded(requires):
    return make(superseded_by=(Supersession("victim:Bakery.sell", "pluggy", requires, "it bakes itself"),))


def test_a_class_that_brings_its_own_is_a_row_of_its_own(victim):
    patch, row = plan([superseded(">=1")])
    assert (patch.verdict, patch.target) == (Verdict.APPLIES, "victim:Shop.sell")
    assert (row.verdict, row.target, row.why) == (Verdict.SUPERSEDED, "victim:Bakery.sell", "it bakes itself")
    assert len(plan([superseded("<0.1")])) == 1


def test_what_was_planned_is_what_is_recorded(victim):
    patch = superseded(">=1")
    ledger = Ledger()
    (record,) = ledger.apply(Phase.BEFORE_BUILD, [patch])
    applied, row = ledger.report()
    assert record.outcome is Outcome.APPLIED
    assert (applied["outcome"], row["outcome"]) == ("applied", "superseded")
    assert (row["target"], row["detail"]) == ("victim:Bakery.sell", "it bakes itself")


@pytest.mark.parametrize(("name", "verdict"), [("sell", Verdict.APPLIES), ("steal", Verdict.MISSING)])
def test_a_target_may_lie_in_folders_without_an_init_file(name, verdict, tmp_path, monkeypatch):
    """``importlib`` finds such a folder only where the package that it lies in is imported."""
    folder = tmp_path / "market" / "stalls" / "fruit"
    folder.mkdir(parents=True)
    (tmp_path / "market" / "__init__.py").touch()
    (folder / "apples.py").write_text("def sell(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = plan([make(target=f"market.stalls.fruit.apples:{name}")])
    assert found.verdict is verdict


def test_impossible_ranges_are_refused_when_a_patch_is_written():
    with pytest.raises(ValueError, match="at least 1"):
        make(package="pluggy", requires="at least 1")
    with pytest.raises(ValueError, match="before_import"):
        make(before="megatron")

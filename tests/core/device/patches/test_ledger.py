import json
import sys
from types import SimpleNamespace

import pytest

from anytron.base.errors import PatchError
from anytron.device.patches import Installed, Ledger, Outcome, Patch, Phase
from anytron.device.stack import DeviceStack
from tests.core.device.patches.named import named


def make(patch_id="p", *, target="victim:greet", phase=Phase.BEFORE_BUILD, owner="us", **fields):
    if "install" not in fields:
        fields.setdefault("replacement", lambda original: lambda: original() + " " + patch_id)
    for how in {"install", "replacement"} & fields.keys():
        fields[how] = named(fields[how])
    return Patch(id=patch_id, owner=owner, target=target, phase=phase, reason="test", **fields)


def test_a_patch_is_applied_in_its_phase_once(victim):
    ledger = Ledger([make(phase=Phase.BEFORE_BUILD)])

    ledger.apply(Phase.BEFORE_PARALLEL_INIT)
    assert victim.greet() == "hello"
    ledger.apply(Phase.BEFORE_BUILD)
    assert ledger.apply(Phase.BEFORE_BUILD) == []
    assert victim.greet() == "hello p"


def test_modules_that_hold_the_old_name_are_found_and_fixed(victim):
    friend = sys.modules["victims_friend"]
    ledger = Ledger()

    (record,) = ledger.apply(Phase.BEFORE_BUILD, [make()])

    assert friend.greet_by_name is victim.greet
    assert "victims_friend.greet_by_name" in record.detail


def test_undo_restores_identity_everywhere(victim):
    friend, original = sys.modules["victims_friend"], victim.greet
    ledger = Ledger([make()])
    ledger.apply(Phase.BEFORE_BUILD)
    friend.imported_meanwhile = victim.greet

    ledger.undo()

    assert victim.greet is friend.greet_by_name is friend.imported_meanwhile is original
    assert [r.outcome for r in ledger.records] == [Outcome.UNDONE]


@pytest.mark.parametrize("name", ["sell", "address", "kind"])
def test_methods_of_every_kind_are_replaced_and_restored_as_their_class_holds_them(victim, name):
    raw = vars(victim.Shop)[name]
    answer = getattr(victim.Shop(), name)()

    def shout(original):
        return lambda *args: original(*args).upper()

    ledger = Ledger([make(target=f"victim:Shop.{name}", replacement=shout)])
    ledger.apply(Phase.BEFORE_BUILD)
    assert getattr(victim.Shop(), name)() == answer.upper()
    ledger.undo()
    assert vars(victim.Shop)[name] is raw


def test_an_inherited_attribute_is_deleted_again(victim):
    ledger = Ledger([make(target="victim:Bakery.sell", replacement=lambda original: lambda self: "cake")])
    ledger.apply(Phase.BEFORE_BUILD)
    assert (victim.Bakery().sell(), victim.Shop().sell()) == ("cake", "bread")
    ledger.undo()
    assert "sell" not in vars(victim.Bakery)


def test_plain_values_are_not_searched_for_in_other_modules(victim):
    sys.modules["victims_friend"].nine = 9
    ledger = Ledger([make(target="victim:Shop.open", replacement=lambda _: 10)])
    ledger.apply(Phase.BEFORE_BUILD)
    assert (victim.Shop.open, sys.modules["victims_friend"].nine) == (10, 9)


def test_two_owners_of_one_target_are_a_conflict_that_names_both(victim):
    with pytest.raises(PatchError, match=r"a of mindspeed, and b of ascend"):
        Ledger([make("a", owner="mindspeed"), make("b", owner="ascend")])


def test_an_installer_is_given_the_ledgers_context_and_its_detail_is_recorded(victim):
    def install(context):
        victim.greet, before = lambda: context, victim.greet
        return Installed(lambda: setattr(victim, "greet", before), f"greets with {context}")

    ledger = Ledger([make(install=install)], context="the context")
    (record,) = ledger.apply(Phase.BEFORE_BUILD)
    assert (victim.greet(), record.detail) == ("the context", "greets with the context")
    ledger.undo()
    assert victim.greet() == "hello"


def test_what_a_patch_does_is_imported_when_it_is_applied(victim):
    ledger = Ledger([Patch("us.late", "victim:part", Phase.AFTER_BUILD, "test", replacement="imported_late:shout")])
    ledger.apply(Phase.BEFORE_BUILD)
    with pytest.raises(PatchError, match="No module named 'imported_late'"):
        ledger.apply(Phase.AFTER_BUILD)


def test_two_patches_of_one_name_are_an_error(victim):
    with pytest.raises(PatchError, match="owners us and them"):
        Ledger([make("a"), make("a", owner="them", target="victim:part")])


def test_a_patch_outside_of_its_version_range_is_skipped_with_the_reason(victim):
    (record,) = Ledger().apply(Phase.BEFORE_BUILD, [make(package="pluggy", requires="<0.1")])
    assert record.outcome is Outcome.SKIPPED
    assert record.detail == f"pluggy {record.installed_version} is outside of <0.1"
    assert victim.greet() == "hello"


def test_a_patch_of_a_package_that_is_not_installed_is_skipped(victim):
    (record,) = Ledger().apply(Phase.BEFORE_BUILD, [make(package="no-such-distribution")])
    assert (record.outcome, record.detail) == (Outcome.SKIPPED, "no-such-distribution is not installed")


def test_a_required_patch_that_fails_stops_the_run_and_is_recorded(victim):
    ledger = Ledger([make(target="victim:missing")])
    with pytest.raises(PatchError, match="The required patch p of us could not be applied"):
        ledger.apply(Phase.BEFORE_BUILD)
    assert [r.outcome for r in ledger.records] == [Outcome.FAILED]


def test_an_optional_patch_that_fails_is_recorded_with_its_reason(victim):
    ledger = Ledger([make(target="victim:missing", required=False), make("q")])
    ledger.apply(Phase.BEFORE_BUILD)
    assert [r.outcome for r in ledger.records] == [Outcome.FAILED, Outcome.APPLIED]
    assert "AttributeError" in ledger.records[0].detail


def test_an_installer_that_leaves_its_target_unchanged_failed(victim):
    ledger = Ledger([make(install=lambda _context: Installed(lambda: None))])
    with pytest.raises(PatchError, match="still the same object after install"):
        ledger.apply(Phase.BEFORE_BUILD)


def test_a_patch_before_import_refuses_an_imported_package_and_names_who_imported_it(victim):
    ledger = Ledger([make(phase=Phase.BEFORE_IMPORT)])
    with pytest.raises(PatchError, match="victim is imported already, by victims_friend"):
        ledger.apply(Phase.BEFORE_IMPORT)
    assert victim.greet() == "hello"


def test_a_patch_before_import_may_name_the_package_that_it_concerns(victim):
    Ledger([make(phase=Phase.BEFORE_IMPORT, before="package_not_imported")]).apply(Phase.BEFORE_IMPORT)
    assert victim.greet() == "hello p"


def test_a_patch_that_imports_a_package_goes_last(victim):
    applied = []

    def noted(id, **fields):
        def install(_context):
            applied.append(id)
            return Installed(lambda: None)

        phase = Phase.BEFORE_IMPORT
        return make(id, target="victim", phase=phase, before="package_not_imported", install=install, **fields)

    Ledger([noted("importer", imports="package_not_imported"), noted("early")]).apply(Phase.BEFORE_IMPORT)
    assert applied == ["early", "importer"]
    with pytest.raises(ValueError, match="may be given only in the phase before_import"):
        make(imports="package_not_imported")


def test_phases_go_forward_only(victim):
    ledger = Ledger()
    ledger.apply(Phase.BEFORE_BUILD)
    with pytest.raises(PatchError, match="can no longer be applied"):
        ledger.apply(Phase.BEFORE_PARALLEL_INIT)
    with pytest.raises(PatchError, match="was added too late"):
        ledger.add([make(phase=Phase.BEFORE_PARALLEL_INIT)])


def test_a_ledger_knows_which_phases_it_has_reached(victim):
    ledger = Ledger()
    assert not ledger.has_reached(Phase.BEFORE_IMPORT)
    ledger.apply(Phase.BEFORE_PARALLEL_INIT)
    assert ledger.has_reached(Phase.BEFORE_IMPORT)
    assert ledger.has_reached(Phase.BEFORE_PARALLEL_INIT)
    assert not ledger.has_reached(Phase.BEFORE_BUILD)


def test_a_stack_applies_new_patches_of_a_phase_that_was_applied_and_refuses_those_that_come_too_late(victim):
    hooks = SimpleNamespace(patch_model=lambda phase, context: [])
    stack = DeviceStack(SimpleNamespace(hooks=hooks), Ledger())
    first, second = make("first"), make("second", target="victim:part")
    stack.apply_phase(Phase.BEFORE_BUILD, [first])

    assert [one.patch for one in stack.apply_phase(Phase.BEFORE_BUILD, [first, second])] == [second]
    assert (victim.greet(), victim.part()) == ("hello first", "goodbye second")
    assert stack.apply_phase(Phase.BEFORE_BUILD, [first, second]) == []
    with pytest.raises(PatchError, match=r"early .* was added too late"):
        stack.apply_phase(Phase.BEFORE_PARALLEL_INIT, [make("early", phase=Phase.BEFORE_PARALLEL_INIT)])


def test_what_someone_else_patched_over_is_reported_and_left_alone_by_undo(victim):
    ledger = Ledger([make("a"), make("b", target="victim:part")])
    ledger.apply(Phase.BEFORE_BUILD)
    foreign = victim.greet = lambda: "bonjour"

    assert [patch.id for patch in ledger.verify()] == ["a"]
    with pytest.raises(PatchError, match="a"):
        ledger.undo()
    assert victim.greet is foreign
    assert victim.part() == "goodbye"
    assert {r.patch.id: r.outcome for r in ledger.records} == {"a": Outcome.APPLIED, "b": Outcome.UNDONE}


def test_a_patch_of_a_name_and_then_of_the_function_s_home_are_both_undone(victim):
    friend, original = sys.modules["victims_friend"], victim.greet
    ledger = Ledger([make("name", target="victims_friend:greet_by_name"), make("home")])
    ledger.apply(Phase.BEFORE_BUILD)
    assert friend.greet_by_name() == victim.greet() == "hello name home"
    assert ledger.verify() == []

    ledger.undo()

    assert victim.greet is friend.greet_by_name is original
    assert {record.outcome for record in ledger.records} == {Outcome.UNDONE}


def test_the_report_is_json_with_every_documented_key(victim):
    ledger = Ledger([make(package="pluggy", requires=">=1", upstream="issue 1", remove_when="never")])
    ledger.apply(Phase.BEFORE_BUILD)
    (entry,) = json.loads(json.dumps(ledger.report()))
    assert set(entry) == {
        "id", "owner", "target", "phase", "required", "outcome", "reason", "requires", "installed", "detail", "stays",
        "upstream", "remove_when",
    }  # fmt: skip
    assert (entry["outcome"], entry["phase"], entry["requires"]) == ("applied", "before_build", "pluggy>=1")


def test_a_patch_says_exactly_one_of_how():
    for fields in ({}, {"replacement": "math:floor", "install": "math:ceil"}):
        with pytest.raises(ValueError, match="exactly one"):
            Patch(id="p", owner="us", target="m:a", phase=Phase.AFTER_BUILD, reason="", **fields)
    for function in ("math.floor", abs):
        with pytest.raises(ValueError, match="module:function"):
            Patch(id="p", owner="us", target="m:a", phase=Phase.AFTER_BUILD, reason="", replacement=function)

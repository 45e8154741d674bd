"""Others patch too: what they drop is found and applied again, what they wrap is left alone, what hides is named."""

import functools
import gc
import sys
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.base.errors import PatchError
from anytron.base.garbage import exempt_objects
from anytron.device.patches import Installed, Ledger, Outcome, Patch, Phase
from tests.core.device.patches.named import named


def make(patch_id="p", *, target="victim:greet", owner="us", **fields):
    if "install" not in fields:
        fields.setdefault("replacement", lambda original: lambda: original() + " " + patch_id)
    for how in {"install", "replacement"} & fields.keys():
        fields[how] = named(fields[how])
    fields.setdefault("phase", Phase.BEFORE_BUILD)
    return Patch(id=patch_id, owner=owner, target=target, reason="test", **fields)


def test_what_a_third_party_replaced_is_applied_again_on_top_of_it(victim):
    friend = sys.modules["victims_friend"]
    ledger = Ledger([make("a"), make("b")])
    ledger.apply(Phase.BEFORE_BUILD)
    victim.greet = lambda: "bonjour"

    assert [patch.id for patch in ledger.verify()] == ["a", "b"]
    records = ledger.revalidate()

    assert victim.greet() == "bonjour a b"
    assert [record.outcome for record in records] == [Outcome.APPLIED] * 2
    assert all("applied again after other code" in record.detail for record in records)
    assert ledger.verify() == []
    assert friend.greet_by_name() == "hello"  # it held the original, which is not what was replaced


def test_the_next_phase_begins_by_looking_for_what_was_lost(victim):
    ledger = Ledger([make("a")])
    ledger.apply(Phase.BEFORE_BUILD)
    victim.greet = lambda: "bonjour"
    assert ledger.apply(Phase.AFTER_BUILD) == []
    assert victim.greet() == "bonjour a"


def test_undoing_what_was_applied_again_leaves_the_third_partys_own(victim):
    ledger = Ledger([make()])
    ledger.apply(Phase.BEFORE_BUILD)
    foreign = victim.greet = lambda: "bonjour"
    ledger.revalidate()
    ledger.undo()
    assert victim.greet is foreign


@pytest.mark.parametrize("how", ["wraps", "closure", "partial"])
def test_what_a_third_party_wrapped_is_still_in_effect(victim, how):
    ledger = Ledger([make()])
    ledger.apply(Phase.BEFORE_BUILD)
    inner = victim.greet

    def louder(function=None):
        return (function or inner)().upper()

    victim.greet = {
        "wraps": functools.wraps(inner)(lambda: "HELLO P"),
        "closure": louder,
        "partial": functools.partial(inner),
    }[how]

    assert ledger.verify() == []
    assert ledger.revalidate() == []
    with pytest.raises(PatchError, match="other code changed the targets"):
        ledger.undo()


def test_a_patch_of_many_places_is_not_applied_twice(victim):
    def install(_context):
        victim.greet, before = lambda: "ours", victim.greet
        return Installed(lambda: setattr(victim, "greet", before))

    ledger = Ledger([make(install=install)])
    ledger.apply(Phase.BEFORE_BUILD)
    victim.greet = lambda: "theirs"
    with pytest.raises(PatchError, match="cannot be applied again: p"):
        ledger.revalidate()


def test_a_subclass_that_brings_its_own_is_named(victim):
    vars(victim)["Market"] = type("Market", (victim.Shop,), {"sell": lambda self: "fish", "__module__": "victim"})
    ledger = Ledger()
    (record,) = ledger.apply(Phase.BEFORE_BUILD, [make(target="victim:Shop.sell", replacement=lambda _: lambda s: "")])
    assert record.detail == "not reached, because they define their own: victim:Market.sell"


def test_who_keeps_the_original_where_no_name_holds_it_is_reported(victim):
    exec(
        "def call(function=greet):\n    return function()\n"
        "class Holder:\n    method = greet\n"
        "TABLE = {'greet': greet}\n",
        vars(victim),
    )
    (record,) = Ledger().apply(Phase.BEFORE_BUILD, [make()])
    for holder in ("a default argument of victim.call", "victim.Holder.method", "victim.TABLE"):
        assert holder in record.detail


def test_who_keeps_the_original_is_found_also_if_it_is_exempt_from_collections(victim):
    """Modules are, when a process builds its second engine."""
    exec("TABLE = {'greet': greet}\n", vars(victim))
    exempt_objects()
    (record,) = Ledger().apply(Phase.BEFORE_BUILD, [make()])
    assert "victim.TABLE" in record.detail


def test_one_search_finds_who_keeps_the_originals_of_all_patches_of_a_phase(victim, monkeypatch):
    exec(
        "def call(function=greet):\n    return function()\nTABLE = {'part': part}\nBOTH = [greet, part]\n", vars(victim)
    )
    searches = []
    referrers = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: searches.append(len(objects)) or referrers(*objects))

    records = Ledger().apply(Phase.BEFORE_BUILD, [make(), make("q", target="victim:part")])

    held = [set(record.detail.partition("still held by ")[2].split(", ")) for record in records]
    assert held == [{"a default argument of victim.call", "victim.BOTH"}, {"victim.TABLE", "victim.BOTH"}]
    assert len(searches) == 2, "each looks at all objects of the process"


def test_containers_with_code_of_their_own_are_searched_without_it(victim):
    exec(
        "from collections import defaultdict\n"
        "class Odd(dict):\n"
        "    def get(self, *key): raise KeyError(key)\n"
        "    def values(self): raise OSError\n"
        "    def __iter__(self): raise OSError\n"
        "TABLE, ODD = defaultdict(greet), Odd(a=greet)\n"
        "globals()[7] = [greet]\n",
        vars(victim),
    )
    (record,) = Ledger().apply(Phase.BEFORE_BUILD, [make()])
    assert record.detail.endswith("the original is still held by victim.ODD, victim.TABLE")


def test_a_search_that_fails_is_a_remark(victim):
    class Meta(type):
        @property
        def __module__(cls):
            raise OSError("no module")

    vars(victim)["Holder"] = Meta("Holder", (), {"method": victim.greet})
    (record,) = Ledger().apply(Phase.BEFORE_BUILD, [make()])
    assert record.outcome is Outcome.APPLIED
    assert record.detail.endswith("its holders cannot be searched: OSError: no module")


def test_holders_are_searched_although_a_later_patch_fails(victim):
    vars(victim)["TABLE"] = {"greet": victim.greet}
    ledger = Ledger()
    with pytest.raises(PatchError, match="could not be applied"):
        ledger.apply(Phase.BEFORE_BUILD, [make(), make("q", target="victim:missing")])
    assert ledger.records[0].detail.endswith("still held by victim.TABLE")


def test_what_cannot_be_applied_again_is_recorded_as_it_is(victim):
    ledger = Ledger([make(), make("q", target="victim:part", required=False), make("r", target="victim:Shop.open")])
    ledger.apply(Phase.BEFORE_BUILD)
    victim.greet = victim.part = victim.Shop.open = 3
    del victim.greet

    with pytest.raises(PatchError, match="could not be applied"):
        ledger.revalidate()

    assert [record.outcome for record in ledger.records] == [Outcome.FAILED, Outcome.UNDONE, Outcome.UNDONE]


def test_a_name_that_belongs_to_someone_else_is_replaced_in_its_module_only(victim):
    friend = sys.modules["victims_friend"]
    ledger = Ledger([make(rebinds=False)])
    ledger.apply(Phase.BEFORE_BUILD)
    assert (victim.greet(), friend.greet_by_name()) == ("hello p", "hello")


def test_owners_of_one_target_do_not_conflict_where_their_versions_do_not_meet(victim):
    ledger = Ledger([
        make("old", owner="mindspeed", package="pluggy", requires="<0.1"),
        make("new", owner="ascend", package="pluggy", requires=">=0.1"),
    ])  # fmt: skip
    ledger.apply(Phase.BEFORE_BUILD)
    assert victim.greet() == "hello new"


def test_patches_that_conflict_are_not_added_at_all(victim):
    ledger = Ledger()
    with pytest.raises(PatchError, match="Patches of two owners"):
        ledger.add([make("a", owner="mindspeed"), make("b", owner="ascend")])
    assert ledger.apply(Phase.BEFORE_BUILD) == []


steps = st.lists(st.sampled_from(["apply", "undo", "replace", "wrap", "revalidate"]), max_size=12)


@settings(max_examples=20)  # each looks through all objects of the process
@given(steps)
def test_in_any_order_of_ours_and_theirs_the_target_does_what_the_records_say(order):
    """A model: the target is a list of who acts, in their order; they hide what was there when they replace it."""
    module = ModuleType("contested")
    module.act = lambda: ["original"]
    sys.modules["contested"] = module
    try:
        ledger = Ledger([make("ours", target="contested:act", replacement=lambda inner: lambda: [*inner(), "ours"])])
        expected, base = ["original"], ["original"]
        applied = False
        for number, step in enumerate(order):
            inner = module.act
            if step == "apply" and not applied:
                ledger.apply(Phase.BEFORE_BUILD)
                base, expected, applied = expected, [*expected, "ours"], True
            elif step == "undo" and applied and expected == [*base, "ours"]:
                ledger.undo()
                expected, applied = base, False
            elif step == "undo" and applied:
                with pytest.raises(PatchError):
                    ledger.undo()
            elif step == "replace":
                module.act = lambda number=number: [number]
                expected = [number]
            elif step == "wrap":
                module.act = functools.wraps(inner)(lambda inner=inner, number=number: [*inner(), number])
                expected = [*expected, number]
            elif step == "revalidate" and applied:
                lost = "ours" not in expected
                assert len(ledger.revalidate()) == lost
                if lost:
                    base, expected = expected, [*expected, "ours"]
            assert module.act() == expected
            assert bool(ledger.verify()) == (applied and "ours" not in expected)
    finally:
        del sys.modules["contested"]

"""Whatever is applied and undone in whatever order: what is left is what the records say."""

import sys
from types import ModuleType

from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.device.patches import Ledger, Outcome, Patch, Phase
from tests.core.device.patches.named import named

NAMES = ("a", "b", "c")
PHASES = tuple(Phase)[1:]

patches = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(PHASES), st.booleans()), min_size=1, max_size=8)
steps = st.lists(st.tuples(st.sampled_from(["apply", "undo"]), st.sampled_from(PHASES)), max_size=10)


@settings(max_examples=25)  # each applies patches to real modules
@given(patches, steps)
def test_apply_and_undo_in_any_order(described, order):
    module, friend = ModuleType("property_victim"), ModuleType("property_friend")
    originals = {name: (lambda name=name: [name]) for name in NAMES}
    vars(module).update(originals)
    vars(friend).update(originals)
    sys.modules |= {"property_victim": module, "property_friend": friend}
    try:
        ledger = Ledger(
            Patch(
                id=str(number),
                owner="us",
                target=f"property_victim:{name}",
                phase=phase,
                reason="",
                package="" if fits else "pluggy",
                requires="" if fits else "<0.1",
                replacement=named(lambda original, number=number: lambda: [*original(), number]),
            )
            for number, (name, phase, fits) in enumerate(described)
        )
        reached = -1
        for action, phase in order:
            index = PHASES.index(phase)
            if action == "undo":
                ledger.undo(phase)
                reached = min(reached, index - 1)
            elif index >= reached:
                ledger.apply(phase)
                reached = index
            applied = [int(r.patch.id) for r in ledger.records if r.outcome is Outcome.APPLIED]
            for name in NAMES:
                held = [number for number in applied if described[number][0] == name]
                first, *rest = getattr(module, name)()
                assert first == name
                assert sorted(rest) == sorted(held)
                assert getattr(friend, name) is getattr(module, name)
        ledger.undo()
        assert all(getattr(module, name) is originals[name] is getattr(friend, name) for name in NAMES)
    finally:
        del sys.modules["property_victim"], sys.modules["property_friend"]

"""Multi-latent attention, packed, on the installed Megatron: equal to padded in float64, also for strict kernels.

The reference is Megatron's own padded forward pass with attention computed by its formula; no patch
touches it. ``strict`` is a kernel that refuses values of another width than queries, and asserts on the
width that its module was built for, as Transformer Engine and MindSpeed do.
"""

import pytest

from anytron.device.patches.plan import in_range, installed_version

VERSION = installed_version("megatron-core")
RANGES = {
    "megatron.mla-packed-rotary": "<0.13",
    "megatron.mla-packed-qkv": "<0.13",
    "megatron.mla-padded-positions": "<0.14",
    "megatron.mla-values": "<0.18,!=0.16.2",
}
# Without Transformer Engine, 0.16 cannot build the class (isinstance with TELinear = None).
MODULES = ("portable", "local") if in_range(VERSION, "<0.16") else ("portable",)


CASES = [pytest.param((1, modules), id=f"tp1-{modules}") for modules in MODULES]
CASES += [pytest.param((2, modules), id=f"tp2-{modules}", marks=pytest.mark.slow) for modules in MODULES]


@pytest.fixture(scope="module", params=CASES)
def facts(request, run_program, tmp_path_factory):
    world, modules = request.param
    return run_program("mla.py", modules, world=world, tmp_path=tmp_path_factory.mktemp("mla"))


def equal(difference):
    """Log-probs, and gradients relative to the largest, agree to the last digits of float64."""
    return not isinstance(difference, str) and max(difference) < 1e-12


def test_packed_equals_padded_with_every_kernel_and_every_recomputation(facts):
    observed = {name: facts["patched"][name] for name in facts["patched"] if name != "variant"}
    assert len(observed) == 7
    assert all(map(equal, observed.values())), observed


def test_without_patches_a_strict_kernel_refuses_on_the_versions_that_have_the_fault(facts):
    refused = [name for name, found in facts["unpatched"].items() if name != "variant" and not equal(found)]
    wanted = set(facts["patched"]) - {"variant"}
    if in_range(VERSION, "<0.14"):
        assert set(refused) == wanted  # not even a kernel that takes everything
    elif in_range(VERSION, RANGES["megatron.mla-values"]):
        assert set(refused) == wanted - {"tolerant"}
    else:
        assert refused == []


def test_each_patch_applies_to_the_versions_that_have_its_fault_and_is_skipped_on_the_others(facts):
    outcomes = {row["id"]: row["outcome"] for row in facts["report"] if row["outcome"] != "superseded"}
    for name, affected in RANGES.items():
        assert outcomes[name] == ("applied" if in_range(VERSION, affected) else "skipped"), name
    reasons = {row["id"]: row["detail"] for row in facts["report"] if row["outcome"] == "skipped"}
    for name, affected in RANGES.items():
        assert name not in reasons or reasons[name] == f"megatron-core {VERSION} is outside of {affected}"


def test_none_of_them_can_be_left_out_where_it_applies(facts):
    without = {name: found for name, found in facts["without"].items() if name in RANGES}  # others have their own tests
    assert set(without) == {name for name, affected in RANGES.items() if in_range(VERSION, affected)}
    assert not any(map(equal, without.values())), without


@pytest.mark.mcore
@pytest.mark.skipif(not in_range(VERSION, ">=0.16,<0.18,!=0.16.2"), reason="other versions have no such fault")
def test_a_variant_gets_its_extra_inputs_also_when_it_is_recomputed(facts):
    assert "NoneType" in facts["unpatched"]["variant"]
    assert equal(facts["patched"]["variant"])


def test_what_a_forward_pass_touches_it_restores(facts):
    assert facts["touched"] == []
    assert facts["width"] == 6

"""Every family computes what Hugging Face computes, in every layout, and trains alike in all of them.

The figures of a run are written into the documentation by
``pytest tests/backends/megatron/families --families-table docs/reference/families.md``.
"""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from anytron.errors import ConfigError
from anytron.plugins import open_session
from tests.backends.megatron.families.layouts import FAMILIES, ONE, REFUSALS, Layout
from tests.backends.megatron.families.observe import Truth, compare, largest, observe
from tests.backends.megatron.families.table import rows_of
from tests.backends.megatron.ranks import engine_config

PAGE = Path(__file__).parents[4] / "docs/reference/families.md"
CASES = [
    pytest.param(family, layout, id=f"{family.name}-{layout.name}") for family in FAMILIES for layout in family.layouts
]
every_layout = pytest.mark.parametrize(("family", "layout"), CASES)
QWEN3 = FAMILIES[0]


@every_layout
def test_logits_are_those_of_hugging_face(family, layout, figures_of):
    assert figures_of(family, layout).logits <= 1e-5


@every_layout
def test_bfloat16_costs_no_more_than_it_costs_hugging_face(family, layout, figures_of):
    figures = figures_of(family, layout)
    assert figures.half_logits <= 2 * figures.half_rounding


@every_layout
def test_an_export_is_the_checkpoint_bit_for_bit(family, layout, figures_of):
    assert figures_of(family, layout).unequal == ()


@every_layout
def test_a_layout_agrees_with_the_first(family, layout, figures_of):
    figures = figures_of(family, layout)
    assert figures.log_probs <= 1e-5
    assert figures.gradients <= 1e-4
    assert figures.grad_norms <= 1e-5
    assert figures.weights <= 1e-5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_updates_move_the_weights(family, observed):
    """Agreement would prove nothing of a parameter that no update reaches."""
    one = observed(family, family.layouts[0])
    moved = {name: largest(before - one.after[name]) for name, before in one.before.items()}
    assert [name for name, by in moved.items() if by == 0] == []
    assert max(moved.values()) > 1e-3
    assert min(one.grad_norms) > 1e-2


def test_a_broken_all_reduce_is_noticed(
    ranks, observed, truth_of, tiny_family, recorded, policy_loss, write_extension, tmp_path
):
    write_extension("megatron.core.tensor_parallel.mappings:_reduce", "lambda original: lambda x, group=None: x")
    layout = Layout("TP2", {"tensor_model_parallel_size": 2, "sequence_parallel": False})
    broken = observe(ranks, tiny_family(QWEN3.name), layout, recorded, policy_loss, tmp_path)

    figures = compare(broken, observed(QWEN3, ONE), truth_of(QWEN3))

    assert figures.logits > 1e-2
    assert figures.half_logits > 2 * figures.half_rounding
    assert figures.log_probs > 1e-3
    assert figures.gradients > 1e-2
    assert figures.grad_norms > 1e-3
    assert figures.weights > 1e-4
    assert figures.unequal == ()


def test_a_permuted_weight_is_noticed(ranks, truth_of, tiny_family, recorded, policy_loss, observed, tmp_path):
    permuted = shutil.copytree(tiny_family(QWEN3.name), tmp_path / "permuted")
    weights = load_file(permuted / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name] = weights[name].flip(1).contiguous()
    save_file(weights, permuted / "model.safetensors", {"format": "pt"})

    one = observe(ranks, permuted, ONE, recorded, policy_loss, tmp_path)
    figures = compare(one, observed(QWEN3, ONE), truth_of(QWEN3))

    assert figures.logits > 1e-2
    assert set(figures.unequal) == {name}
    assert compare(one, one, Truth.of(permuted, recorded)).logits <= 1e-5


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.family}-{refusal.layout.name}")
def test_what_cannot_be_right_is_refused(refusal, tiny_family, tmp_path):
    layout = refusal.layout
    config = engine_config(tiny_family(refusal.family), tmp_path, parallel=layout.parallel, engine=layout.engine)
    with pytest.raises(ConfigError, match=refusal.reason):
        open_session(platform="cpu").hooks.configure(config)


def test_the_page_has_the_rows_of_this_file():
    expected = [(family.title, layout.name) for family in FAMILIES for layout in family.layouts]
    assert rows_of(PAGE) == expected, "run pytest with --families-table, see the top of this file"

"""Every family computes what Hugging Face computes, in every layout, and trains alike in all of them.

The figures of a run are written into the documentation by
``pytest tests/backends/megatron/families --families-table docs/reference/families.md``.
"""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from anytron.base.errors import ConfigError
from anytron.device.loading import open_session
from anytron.device.patches.plan import in_range, installed_version
from anytron.task.data.pretrained import INDEXER
from anytron_megatron.models.families import FAMILIES
from tests.backends.megatron.families.layouts import CP2, CP2_PADDED, EVERY_MODEL, MODELS, ONE, REFUSALS, Layout, proved
from tests.backends.megatron.families.observe import BOUNDS, Truth, beyond_bounds, compare, difference, largest, observe
from tests.backends.megatron.families.table import PAGE, mask_rows, refused_rows, rows_of, support_rows
from tests.backends.megatron.ranks import engine_config


def marks_of(model, layout):
    """Marks of the tests of a model in a layout; a model that the installed release refuses is skipped."""
    refused = pytest.mark.skipif(model.refused, reason="refused with the installed megatron-core")
    return [
        *([refused, pytest.mark.mcore] if model.refused else []),
        *(getattr(pytest.mark, mark) for mark in model.marks(layout)),
    ]


CASES = [
    pytest.param(model, layout, id=f"{model.name}-{layout.name}", marks=marks_of(model, layout))
    for model in EVERY_MODEL
    for layout in model.layouts
]
every_layout = pytest.mark.parametrize(("model", "layout"), CASES)
every_model = pytest.mark.parametrize(
    "model",
    [pytest.param(model, id=model.name, marks=marks_of(model, model.layouts[0])) for model in EVERY_MODEL],
)
QWEN3 = MODELS[0]
(QWEN3_NEXT,) = (model for model in MODELS if model.name == "qwen3_next")
(SPARSE,) = (model for model in EVERY_MODEL if model.name == "deepseek_v32")
(HYBRID,) = (model for model in EVERY_MODEL if model.name == "nemotron3")
(GLM4_6,) = (model for model in EVERY_MODEL if model.name == "glm4_6")


@every_layout
def test_logits_are_those_of_hugging_face(model, layout, figures_of):
    assert figures_of(model, layout).logits <= BOUNDS["logits"]


@every_layout
def test_bfloat16_costs_no_more_than_it_costs_hugging_face(model, layout, figures_of):
    assert "half_logits" not in beyond_bounds(figures_of(model, layout))


@every_layout
def test_every_gradient_is_that_of_hugging_face(model, layout, figures_of):
    figures = figures_of(model, layout)
    assert figures.policy_gradients <= BOUNDS["policy_gradients"], figures.worst


@every_layout
def test_an_export_is_the_checkpoint_bit_for_bit(model, layout, figures_of):
    assert figures_of(model, layout).unequal == ()


@every_layout
def test_a_layout_agrees_with_the_first(model, layout, figures_of):
    assert beyond_bounds(figures_of(model, layout)).isdisjoint({"log_probs", "gradients", "grad_norms", "weights"})


@every_model
def test_updates_move_the_weights(model, observed):
    """Agreement would prove nothing of a parameter that no update reaches; indexers and towers without images stay."""
    one = observed(model, model.layouts[0])
    moved = {name: largest(difference(before, one.after[name])) for name, before in one.before.items()}
    stays = {name for name in moved if INDEXER in name or re.search(model.still, name)}
    assert {name for name, by in moved.items() if by == 0} == stays
    assert max(moved.values()) > 1e-3
    assert min(one.grad_norms) > 1e-2


def test_a_broken_all_reduce_is_noticed(ranks, observed, truth_of, tiny_family, policy_loss, write_extension, tmp_path):
    write_extension("megatron.core.tensor_parallel.mappings:_reduce", "lambda original: lambda x, group=None: x")
    layout = Layout("TP2", {"tensor_model_parallel_size": 2, "sequence_parallel": False})
    broken = observe(ranks, tiny_family(QWEN3.name), layout, truth_of(QWEN3), policy_loss, tmp_path)

    figures = compare(broken, observed(QWEN3, ONE), truth_of(QWEN3))

    assert figures.logits > 1e-2
    assert figures.half_logits > 2 * figures.half_rounding
    assert figures.policy_gradients > 1e-2
    assert figures.log_probs > 1e-3
    assert figures.gradients > 1e-2
    assert figures.grad_norms > 1e-3
    assert figures.weights > 1e-4
    assert figures.unequal == ()


@pytest.mark.slow
@pytest.mark.mcore
@pytest.mark.skipif(
    not in_range(installed_version("megatron-core"), "<0.18"), reason="later versions exchange heads themselves"
)
def test_shards_in_the_wrong_order_are_noticed(
    ranks, observed, truth_of, tiny_family, policy_loss, write_extension, tmp_path
):
    """Gated DeltaNet reads the ranks' chunks one rank after the other, not as the sequence has them."""
    write_extension(
        "anytron_megatron.patches.delta_net:_to_heads",
        "lambda original: lambda x, group, order: original(x, group, order.sort().values)",
    )
    for layout in (CP2, CP2_PADDED):
        broken = observe(ranks, tiny_family(QWEN3_NEXT.name), layout, truth_of(QWEN3_NEXT), policy_loss, tmp_path)
        figures = compare(broken, observed(QWEN3_NEXT, ONE), truth_of(QWEN3_NEXT))
        assert figures.logits > 1e-3
        assert figures.log_probs > 1e-3
        assert figures.gradients > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "factor",
    [
        pytest.param("(0 if cp_group.rank() else 1)", id="one rank's"),
        pytest.param("0.5", id="averaged", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_heads_that_are_not_summed_are_noticed(
    factor, ranks, observed, truth_of, tiny_family, policy_loss, write_extension, tmp_path
):
    """Each context-parallel rank has the gradients of its heads only; values show nothing of what becomes of them."""
    write_extension(
        "mcore_bridge.model.modules.gated_delta_net:get_parameter_local_cp",
        "lambda original: lambda param, dim, cp_group: (lambda part: part.detach() + "
        f"{factor} * (part - part.detach()))(original(param, dim, cp_group))",
    )
    broken = observe(ranks, tiny_family(QWEN3_NEXT.name), CP2, truth_of(QWEN3_NEXT), policy_loss, tmp_path)
    figures = compare(broken, observed(QWEN3_NEXT, ONE), truth_of(QWEN3_NEXT))
    assert figures.logits <= 1e-5
    assert figures.gradients > 1e-1


def test_a_permuted_weight_is_noticed(ranks, truth_of, tiny_family, recorded, policy_loss, observed, tmp_path):
    permuted = shutil.copytree(tiny_family(QWEN3.name), tmp_path / "permuted")
    weights = load_file(permuted / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name] = weights[name].flip(1).contiguous()
    save_file(weights, permuted / "model.safetensors", {"format": "pt"})

    one = observe(ranks, permuted, ONE, truth_of(QWEN3), policy_loss, tmp_path)
    figures = compare(one, observed(QWEN3, ONE), truth_of(QWEN3))

    assert figures.logits > 1e-2
    assert set(figures.unequal) == {name}
    assert compare(one, one, Truth.of(permuted, recorded)).logits <= 1e-5


SABOTAGE = {
    "a swapped weight": (
        "mcore_bridge.bridge.gpt_bridge:GPTBridge._set_qk_layernorm",
        (
            "lambda original: lambda self, mg_attn, hf_state_dict, to_mcore, **more: ["
            "self._set_state_dict(mg_attn, f'{one}_layernorm.weight', hf_state_dict, f'{other}_norm.weight', to_mcore)"
            " for one, other in ('qk', 'kq')]"
        ),
        {"logits", "half_logits", "policy_gradients"},
        r"layers\.\d\.self_attn\.[qk]_norm\.weight",
    ),
    "a lost bias": (
        "mcore_bridge.bridge.gpt_bridge:GPTBridge._set_qkv",
        (
            "lambda original: lambda self, mg_attn, hf_state_dict, to_mcore, **more: "
            "(original(self, mg_attn, hf_state_dict, to_mcore, **more), "
            "to_mcore and mg_attn.linear_qkv.bias.data.zero_())[0]"
        ),
        {"logits", "half_logits", "policy_gradients", "unequal"},
        "",
    ),
    "an epsilon": (
        "mcore_bridge.config.model_config:ModelConfig.__post_init__",
        "lambda original: lambda self: (setattr(self, 'layernorm_epsilon', 1e-6), original(self))[1]",
        {"logits", "policy_gradients"},
        "",
    ),
}
"""Wrong bridges for GLM-4.6: what is replaced and by what, the figures that must show it, and the parameter whose
gradient is worst, as a regular expression."""


@pytest.mark.families
@pytest.mark.parametrize("case", SABOTAGE)
def test_a_broken_bridge_is_noticed(case, ranks, truth_of, tiny_family, policy_loss, write_extension, tmp_path):
    target, replacement, expected, worst = SABOTAGE[case]
    write_extension(target, replacement)
    truth = truth_of(GLM4_6)
    one = observe(ranks, tiny_family(GLM4_6.name), ONE, truth, policy_loss, tmp_path)

    figures = compare(one, one, truth)

    assert beyond_bounds(figures) == expected
    assert re.search(worst, figures.worst)


@pytest.mark.families
@pytest.mark.mcore
@pytest.mark.skipif(SPARSE.refused, reason="refused with the installed megatron-core")
def test_an_indexer_that_chooses_other_keys_is_noticed(
    ranks, truth_of, tiny_family, policy_loss, write_extension, tmp_path
):
    """Its queries are ``[T, B, N, D]`` and its keys ``[T, B, D]``: only queries are transformed."""
    write_extension(
        "anytron_megatron.patches.sparse_attention:hadamard_transform",
        "lambda original: lambda x: original(x) if x.ndim == 4 else x",
    )
    truth = truth_of(SPARSE)
    one = observe(ranks, tiny_family(SPARSE.name), ONE, truth, policy_loss, tmp_path)
    figures = compare(one, one, truth)
    assert figures.logits > 1e-2
    assert figures.policy_gradients > 1e-2
    assert figures.unequal == ()


MAMBA = {
    "states of neighbours": (
        "anytron.kernels.state_space_scan:chunks_of",
        "lambda original: lambda rows, tokens, cu_seqlens, device: original(rows, tokens, None, device)",
        ONE,
    ),
    "chunks of context-parallel ranks in the wrong order": (
        "anytron_megatron.patches.mamba:_order",
        "lambda original: lambda rows, size, packed: original(rows, size, packed).sort().values",
        CP2,
    ),
}
"""What is replaced in Mamba layers and by what, and the layout that must show it."""


@pytest.mark.families
@pytest.mark.mcore
@pytest.mark.skipif(HYBRID.refused, reason="refused with the installed megatron-core")
@pytest.mark.parametrize("case", MAMBA)
def test_mamba_layers_that_read_other_tokens_are_noticed(
    case, ranks, truth_of, tiny_family, policy_loss, write_extension, tmp_path
):
    target, replacement, layout = MAMBA[case]
    write_extension(target, replacement)
    truth = truth_of(HYBRID)
    one = observe(ranks, tiny_family(HYBRID.name), layout, truth, policy_loss, tmp_path)
    figures = compare(one, one, truth)
    assert figures.logits > 1e-4
    assert figures.policy_gradients > 1e-3
    assert figures.unequal == ()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.family}-{refusal.layout.name}")
def test_what_cannot_be_right_is_refused(refusal, tiny_family, tmp_path):
    layout = refusal.layout
    config = engine_config(tiny_family(refusal.family), tmp_path, parallel=layout.parallel, engine=layout.engine)
    with pytest.raises(ConfigError, match=refusal.reason):
        open_session(platform="cpu").hooks.configure(config)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_a_row_claims_what_the_tests_prove(family):
    assert set(family.proof) == proved(family.model_type)
    assert bool(family.title) == bool(family.proof or family.refused)


def test_the_page_has_the_rows_of_these_tests_and_families():
    expected = [(model.title, layout.name) for model in EVERY_MODEL for layout in model.layouts]
    assert list(rows_of(PAGE)) == expected, "run pytest -m families with --families-table, see the top of this file"
    for rows in (support_rows(rows_of(PAGE)), refused_rows(), mask_rows()):
        assert "\n".join(rows) in PAGE.read_text(encoding="utf-8"), (
            "run python -m tests.backends.megatron.families.table"
        )

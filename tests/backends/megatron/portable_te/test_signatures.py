"""The portable modules have Transformer Engine's signatures and the attributes that Megatron reads."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import textwrap
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path

import pytest
import torch

from anytron.base.errors import EngineError
from anytron_megatron import portable_te
from tests.backends.megatron.portable_te.signatures import RECORD, keys, merged, offered, read

VERSIONS = json.loads(RECORD.read_text())
CLAIMED = portable_te.__version__.split("+")[0]
OFFERED = {key: (offer, method) for name, (offer, _) in offered().items() for key, method in keys(name, offer)}

REFUSED = {
    "CudaRNGStatesTracker", "Fp8Padding", "Fp8Unpadding", "GEGLU", "GELU", "LayerNormMLP", "ReGLU", "ReLU",
    "Sequential", "SiLU", "TransformerLayer", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
    "fused_topk_with_score_function",
}  # fmt: skip
"""Names for ``isinstance`` and imports: every call raises an error."""

LEFT_OUT = {
    "FP8 and FP4": ("bf16_backward", "cache_quantized_input", "fp8_grad", "fp8_output", "save_original_input"),
    "communication that overlaps computation": (
        "symmetric_ar_type", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad",
    ),
    "delayed weight gradients": ("delay_wgrad_compute",),
    "parameters in another shape": ("parameters_split", "single_grouped_bias", "single_grouped_weight"),
    "kernels of a vendor": ("capturable", "num_splits", "sm_margin", "use_grouped_tensor"),
    "outputs in the caller's memory": ("dgrad_out", "out"),
    "masks and scores that AttentionCall does not describe": (
        "alibi_slopes", "bottom_right_diagonal", "core_attention_bias", "return_max_logit", "score_mod",
        "score_mod_bprop", "score_mod_bprop_tensors", "score_mod_tensors", "softcap",
    ),
    "packed operands, and attention kernels per sequence": (
        "kv_layer", "pad_between_seqs", "qkv_interleave_dim", "qkv_layer", "thd_attention_policies",
        "thd_attention_policy_dispatch",
    ),
    "generation with a cache": ("inference_params",),
    "Megatron recomputes and cuts sequences itself": ("checkpoint_core_attention", "load_balancing_strategy"),
    "a format of gated activations": ("glu_interleave_size",),
    "names for NVIDIA's debugger": ("name",),
    "older and newer names of params_dtype and device='meta'": ("defer_init", "dtype"),
    "optimizers with other algorithms or number formats": (
        "amsgrad", "exp_avg_dtype", "exp_avg_sq_dtype", "grad_scaler", "master_weight_dtype", "master_weights",
        "store_param_remainders", "use_decoupled_grad", "wd_after_momentum",
    ),
}  # fmt: skip
"""Parameters that the portable functions refuse by name if they are neither None nor False, under the reason."""

OTHER_DEFAULTS = {
    "device": "the device of torch.device, where Transformer Engine's is CUDA",
    "query_layer": "required, because qkv_layer is refused",
    "key_layer": "required, because kv_layer is refused",
    "value_layer": "required, because kv_layer is refused",
}

WITHOUT_EFFECT = {
    "DotProductAttention.__init__(sequence_parallel)": "a rank computes whole sequences for its heads",
    "DotProductAttention.forward(fast_zero_fill)": "both ways write the same zeros",
    "DotProductAttention.set_context_parallel_group(cp_global_ranks)": "the group knows its ranks",
    "DotProductAttention.set_context_parallel_group(cp_stream)": "keys and values are gathered on the current stream",
    "FusedSGD.__init__(materialize_master_grads)": "there are no master weights",
    "GroupedLinear.forward(is_first_microbatch)": "no weight is converted to FP8",
    "LayerNormLinear.forward(is_first_microbatch)": "no weight is converted to FP8",
    "Linear.forward(is_first_microbatch)": "no weight is converted to FP8",
    "TransformerEngineBaseModule.__init__(fuse_wgrad_accumulation)": "Megatron adds param.grad itself",
    "TransformerEngineBaseModule.init_fp8_metadata(num_gemms)": "there are no FP8 scales",
    "activation_recompute_forward(activation_recompute)": "there are no FP8 scales",
    "activation_recompute_forward(recompute_phase)": "there are no FP8 scales",
    "apply_rotary_pos_emb(fused)": "the platform's kernel is always used",
    "checkpoint(get_rng_state_tracker)": "Megatron's checkpoint forks its random states itself",
    "checkpoint(tp_group)": "Megatron's checkpoint knows its group",
    "fp8_autocast(_graph)": "enabled=True is refused",
    "fp8_autocast(fp8_group)": "enabled=True is refused",
    "fp8_autocast(fp8_recipe)": "enabled=True is refused",
    "fp8_model_init(preserve_high_precision_init_val)": "enabled=True is refused",
    "fp8_model_init(recipe)": "enabled=True is refused",
    "moe_permute(max_token_num)": "there is no workspace",
}
"""Parameters that are accepted and ignored, with the reason for which that changes no result."""

MADE = {
    "DotProductAttention": (2, 4),
    "FusedAdam": ([torch.ones(2)],),
    "FusedSGD": ([torch.ones(2)], 0.1),
    "GroupedLinear": (2, 4, 4),
    "LayerNorm": (4,),
    "LayerNormLinear": (4, 4),
    "Linear": (4, 4),
    "RMSNorm": (4,),
    "SwiGLU": (),
    "TransformerEngineBaseModule": (),
}
"""Arguments of constructors."""

CALLED = {
    "DotProductAttention.forward": (torch.ones(3, 1, 2, 4),) * 3,
    "DotProductAttention.set_context_parallel_group": (None, None, None),
    "GroupedLinear.forward": (torch.ones(3, 4), [1, 2]),
    "LayerNormLinear.forward": (torch.ones(3, 4),),
    "Linear.forward": (torch.ones(3, 4),),
}
"""Arguments of methods."""


def functions(key):
    """Return the portable functions behind a name of the record; for a method, also those of the bases."""
    offer, method = OFFERED[key]
    if not inspect.isclass(offer):
        return [offer]
    owners = [owner for owner in offer.__mro__ if owner.__module__.startswith(portable_te.__name__)]
    return [getattr(owner, method) for owner in owners if method in vars(owner)]


def portable(key):
    """Return the signature of a portable function or method without ``self``."""
    found = [inspect.signature(function).parameters.values() for function in functions(key)]
    return merged(Signature([one for one in parameters if one.name != "self"]) for parameters in found)


def differences(theirs, ours):
    """Compare signatures: name of the parameter and ``place``, ``default``, ``absent`` or ``refused``.

    A parameter that is refused unless it is False cannot have the default True.
    """
    places = [
        {
            one.name: place
            for place, one in enumerate(signature.parameters.values())
            if one.kind is one.POSITIONAL_OR_KEYWORD
        }
        for signature in (theirs, ours)
    ]
    refuses = any(one.kind is Parameter.VAR_KEYWORD for one in ours.parameters.values())
    found = {}
    for name, their in theirs.parameters.items():
        our = ours.parameters.get(name)
        if their.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        if our is None:
            found[name] = "refused" if refuses and their.default is not True else "absent"
        elif name in places[1] and places[1][name] != places[0].get(name):
            found[name] = "place"
        elif their.default not in (Parameter.empty, ...) and repr(our.default) != repr(their.default):
            found[name] = "default"
    return found


def compared():
    """Return the recorded signatures of all functions that compute: version, key, signature."""
    return [
        (version, key, read(text))
        for version, record in VERSIONS.items()
        for key, text in record["signatures"].items()
        if key in OFFERED and key.split(".")[0] not in REFUSED
    ]


def found(kind):
    """Return the differences of one kind: keys and names of parameters."""
    return sorted(
        {
            (key, name)
            for _, key, theirs in compared()
            for name, what in differences(theirs, portable(key)).items()
            if what == kind
        }
    )


def test_the_claimed_version_and_a_newer_one_are_recorded():
    assert CLAIMED in VERSIONS
    assert len(VERSIONS) > 1


def test_the_record_has_every_name_that_the_portable_package_exports():
    recorded = {key.split(".")[0] for record in VERSIONS.values() for key in record["signatures"]}
    compiled = {"multi_tensor_l2norm", "multi_tensor_scale"}  # Transformer Engine's are in C++
    modules = (portable_te.pytorch, portable_te.pytorch.optimizers, portable_te.pytorch.attention)
    exported = {name for module in modules for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
    assert {name for name in exported if not name.startswith("_")} - recorded == compiled
    assert {key for record in VERSIONS.values() for key in record["signatures"]} <= set(OFFERED)


@pytest.mark.parametrize("kind", ["place", "absent"])
def test_parameters_are_transformer_engines(kind):
    assert found(kind) == []


def test_parameters_left_out_and_other_defaults_are_those_of_the_tables():
    assert {name for _, name in found("refused")} == {name for names in LEFT_OUT.values() for name in names}
    assert {name for _, name in found("default")} == set(OTHER_DEFAULTS)


@pytest.mark.parametrize(("key", "name"), found("refused"))
def test_a_parameter_left_out_is_refused_by_name(bound, key, name):
    offer, method = OFFERED[key]
    made = MADE[offer.__name__]
    call = partial(offer, *made) if method == "__init__" else getattr(offer(*made), method)
    with pytest.raises(EngineError, match=f"support for {name}="):
        call(*CALLED.get(key, ()), **{name: object()})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_name_that_computes_nothing_refuses_every_call(name):
    offer, method = OFFERED[name if name in OFFERED else f"{name}.__init__"]
    texts = [
        text
        for record in VERSIONS.values()
        for key, text in record["signatures"].items()
        if key in (name, f"{name}.{method}")
    ]
    for text in texts or ["()"]:
        theirs = [one for one in read(text).parameters.values() if one.kind is not one.VAR_POSITIONAL]
        with pytest.raises(EngineError):
            offer(**{one.name: object() for one in theirs})


def test_parameters_without_effect_are_those_of_the_table():
    ignored = set()
    for key in {key for _, key, _ in compared()}:
        for function in functions(key):
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            named = [one.name for one in inspect.signature(function).parameters.values() if one.name != "self"]
            ignored |= {f"{function.__qualname__}({name})" for name in named if name not in used}
    assert ignored == set(WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("freqs", "angles", {"angles": "absent"}),
        ("t, freqs", "freqs, t", {"freqs": "place", "t": "place"}),
        ("cp_size=1", "cp_size=2", {"cp_size": "default"}),
        ("fused=False", "fused=0", {"fused": "default"}),
        ("cp_rank=0", "cp_rank=0, window=None", {"window": "absent"}),
        ("fused=False, ", "", {"cu_seqlens": "place", "cp_size": "place", "cp_rank": "place"}),
        ("cp_size=1", "cp_size=Ellipsis", {}),
    ],
)
def test_another_signature_is_found(before, after, expected):
    key = "apply_rotary_pos_emb"
    text = VERSIONS[CLAIMED]["signatures"][key]
    assert before in text
    assert differences(read(text.replace(before, after)), portable(key)) == expected


def test_a_refused_parameter_that_is_on_by_default_is_found():
    assert differences(read("(inp, fast=True, slow=False)"), portable("Linear.forward")) == {
        "fast": "absent",
        "slow": "refused",
    }


def read_by_megatron():
    """Return the attributes of Transformer Engine's that Megatron's wrappers read: class and name."""
    (folder,) = importlib.util.find_spec("megatron").submodule_search_locations
    tree = ast.parse(Path(folder, "core", "extensions", "transformer_engine.py").read_text())
    wrapped, reads = {}, set()
    for wrapper in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for base in map(ast.unparse, wrapper.bases):
            wrapped[wrapper.name] = wrapped.get(base, base.removeprefix("te.pytorch."))
        assigned = VERSIONS[CLAIMED]["attributes"].get(wrapped.get(wrapper.name), "").split()
        own = [
            node for node in ast.walk(wrapper) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
        ]
        reads |= {
            (wrapped[wrapper.name], node.attr)
            for node in own
            if isinstance(node.ctx, ast.Load) and node.attr in assigned
        }
    return sorted(reads)


@pytest.mark.parametrize(("name", "attribute"), read_by_megatron())
def test_an_attribute_that_megatron_reads_exists(bound, name, attribute):
    offer, _ = OFFERED[f"{name}.__init__"]
    assert hasattr(offer(*MADE[name]), attribute)


def test_megatron_reads_attributes_of_every_kind_of_layer():
    assert {name for name, _ in read_by_megatron()} >= {"DotProductAttention", "GroupedLinear", "Linear"}

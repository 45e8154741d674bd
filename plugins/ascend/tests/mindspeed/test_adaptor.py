"""The adaptor's answers that need no MindSpeed."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch

from anytron.base.errors import ConfigError, HookContractError, PlatformError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.config.schema import RunConfig
from anytron.device.loading import hooks_of, open_session
from anytron.run.preflight.limits import limit_diagnostics
from anytron.sequences import scopes
from anytron.sequences.layout import LayoutConstraints, ModelInputs
from anytron.sequences.masks import AttnMask, MaskKind, MaskRequest, Polarity, scope_of
from anytron.sequences.planning import plan_layout
from anytron_ascend import AscendPlatform
from anytron_ascend.adaptors.mindspeed import MindSpeedAdaptor
from anytron_ascend.mindspeed import installation, process_state
from anytron_ascend.mindspeed.installation import INSTALL, Installation, check_pair, find_installation
from anytron_ascend.mindspeed.patches import call_as_documented, take_arguments
from anytron_ascend.mindspeed.process_state import engine_arguments
from anytron_ascend.options import AscendOptions, MindSpeedOptions

NONE, ROWS_2D, FULL = MaskKind.NONE, MaskKind.PADDING_2D, MaskKind.FULL_4D
LENGTHS = [3, 5]


@pytest.fixture
def adaptor() -> MindSpeedAdaptor:
    return MindSpeedAdaptor(MindSpeedOptions())


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Put a package ``mindspeed`` of some version on the path: what is looked for, without what is in it."""

    def write(version: str | None) -> None:
        package = tmp_path / "mindspeed"
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('it must not be imported to be found')\n")
        if version:
            (tmp_path / "setup.py").write_text(f"__version__ = '{version}'\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


def run_of(**sections) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "unused"}, "data": {"source": "unused"}, "rewards": [{"function": "unused"}], **sections}
    )


# ---- is it there, and for this Megatron? ----------------------------------------------------------------


def test_its_absence_is_an_error_with_the_steps_to_install_it(monkeypatch):
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    with pytest.raises(PlatformError, match="MindSpeed is not installed") as caught:
        find_installation()
    assert "core_r0.16.0" in caught.value.fix
    assert "adaptor=none" in caught.value.fix


def test_it_is_looked_for_before_anything_starts(monkeypatch, adaptor):
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    (finding,) = adaptor.configure(run_of())
    assert (finding.severity, finding.key) == ("error", "platform.options.adaptor")
    assert "MindSpeed is not installed" in finding.message
    assert finding.fix.startswith(INSTALL)


def test_a_checkout_is_found_without_importing_it(checkout):
    checkout("0.16.0")
    found = find_installation()
    assert found.mindspeed == "0.16.0"
    assert "mindspeed" not in sys.modules


@pytest.mark.parametrize("version", ["0.15.3", "0.12.1", "0.17.0"])
def test_a_checkout_of_another_branch_is_refused(checkout, version):
    checkout(version)
    with pytest.raises(PlatformError, match="are not both of release") as caught:
        find_installation()
    assert f"MindSpeed {version} and megatron-core 0.16." in caught.value.why


def test_another_megatron_is_refused(tmp_path):
    check_pair(Installation("0.16.0", "0.16.1", tmp_path))
    with pytest.raises(PlatformError, match="are not both of release"):
        check_pair(Installation("0.16.0", "0.15.3", tmp_path))
    with pytest.raises(PlatformError, match="are not both of release"):
        check_pair(Installation("0.15.3", "0.15.3", tmp_path))


LATENT, GROUPED = "deepseek_v3", "qwen3"


@pytest.mark.parametrize(
    ("policy", "critic", "size", "refused"),
    [
        (LATENT, None, 2, ["model.path"]),
        (LATENT, None, 1, []),
        (GROUPED, None, 2, []),
        (GROUPED, LATENT, 2, ["critic.path"]),
    ],
)
def test_latent_attention_is_not_spread_over_context_parallel_ranks(
    policy, critic, size, refused, checkout, adaptor, tiny_family
):
    checkout("0.16.0")
    sections = {"model": {"path": str(tiny_family(policy))}, "parallel": {"context_parallel_size": size}}
    if critic:
        sections |= {"algorithm": {"advantage": "gae"}, "critic": {"path": str(tiny_family(critic))}}
    found = list(adaptor.configure(run_of(**sections)))
    assert [one.key for one in found] == ["parallel.context_parallel_size"] * len(refused)
    for finding, key in zip(found, refused, strict=True):
        assert finding.severity == "error"
        assert f"does not support the multi-latent attention of {key}" in finding.message


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention"]}, ["sliding-window", "attention-sinks"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["sliding-window"]),
        ({"model_type": "qwen3"}, []),
    ],
)
def test_what_its_attention_would_leave_out_without_a_word_is_refused_before_anything_starts(model, refused):
    config = run_of(model={"config": model, "tokenizer": "unused"})
    for adaptor, words in (("mindspeed", refused), ("none", [])):
        platform = AscendPlatform()
        platform.configure_options(AscendOptions(adaptor=adaptor))
        found = list(limit_diagnostics(config, platform))
        assert [(one.severity, one.key) for one in found] == [("error", "model.config")] * len(words)
        for finding, word in zip(found, words, strict=True):
            assert f"the platform ascend has no {word}: MindSpeed" in finding.message


def test_a_version_that_cannot_be_told_is_an_error(checkout):
    checkout(None)
    with pytest.raises(PlatformError, match="version of the package 'mindspeed' cannot be determined"):
        find_installation()


def test_options_are_typed():
    with pytest.raises(ConfigError, match="context_parallel_algorithm"):
        open_session(
            platform="ascend",
            options={"adaptor": "mindspeed", "mindspeed": {"context_parallel_algorithm": "megatron_cp_algo"}},
        )


def test_it_brings_its_own_modules_and_its_own_torch_cuda():
    platform = AscendPlatform()
    platform.configure_options(AscendOptions(adaptor="mindspeed"))
    assert not platform.portable_modules
    assert not platform.redirects_torch_cuda


# ---- arguments ------------------------------------------------------------------------------------------


def test_every_argument_is_set_for_every_engine():
    defaults = {"sparse_mode": 0, "context_parallel_size": 7, "use_flash_attn": False, "cp_window_size": 1}
    plain = engine_arguments(defaults, ParallelSizes(), MindSpeedOptions())
    ring = engine_arguments(defaults, ParallelSizes(context=2), MindSpeedOptions())
    assert plain.keys() == ring.keys() >= defaults.keys()
    assert (plain["context_parallel_size"], ring["context_parallel_size"]) == (1, 2)
    assert plain["sparse_mode"] == 2
    assert plain["use_flash_attn"]
    assert plain["cp_window_size"] == 1
    assert ring["gated_delta_net"] is False


@dataclass
class TransformerConfig:
    """What of Megatron's config the test is about; with the real one: ``programs/mindspeed_hazards.py``."""

    variable_seq_lengths: bool
    context_parallel_size: int


def test_a_models_config_takes_no_argument_that_is_megatrons(monkeypatch):
    arguments = SimpleNamespace(variable_seq_lengths=False, context_parallel_size=1, sparse_mode=2)
    for name, content in (
        ("megatron.core.transformer", {"TransformerConfig": TransformerConfig}),
        ("mindspeed.args_utils", {"get_full_args": lambda: arguments}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    config = TransformerConfig(variable_seq_lengths=True, context_parallel_size=2)
    take_arguments(print)(config)
    assert vars(config) == {"variable_seq_lengths": True, "context_parallel_size": 2, "sparse_mode": 2}


# ---- masks ----------------------------------------------------------------------------------------------


def layout_of(format):
    return plan_layout(torch.tensor(LENGTHS), format=format, constraints=LayoutConstraints(align=4))


@pytest.mark.parametrize(
    ("format", "traits", "accepted", "kind", "mode"),
    [
        pytest.param("thd", ModelTraits(), {NONE}, NONE, "sparse_mode=2", id="thd"),
        pytest.param("bshd", ModelTraits(), {NONE, FULL}, NONE, "sparse_mode=2", id="text, triangle made by MindSpeed"),
        pytest.param("bshd", ModelTraits(), {FULL}, FULL, "sparse_mode=1", id="text, full only where nothing else"),
        pytest.param("bshd", ModelTraits(vision=True), {NONE}, NONE, "sparse_mode=2", id="vision"),
        pytest.param("thd", ModelTraits(vision=True), {ROWS_2D}, ROWS_2D, "sparse_mode=2", id="packs inside"),
    ],
)
def test_masks_by_family_and_format(adaptor, format, traits, accepted, kind, mode):
    request = MaskRequest(format, traits, ParallelSizes(), frozenset(accepted))
    built = adaptor.build_attn_mask(request)
    mask = adaptor.build_attn_mask(MaskRequest(format, traits, ParallelSizes(), frozenset(accepted), layout_of(format)))
    assert (built.kind, built.kernel_mode) == (mask.kind, mask.kernel_mode) == (kind, mode)
    if kind is ROWS_2D:
        assert mask.read_as(Polarity.KEEP).sum(1).tolist() == LENGTHS


def test_a_full_mask_leaves_no_row_blind(adaptor):
    request = MaskRequest("bshd", ModelTraits(), ParallelSizes(), frozenset({FULL}), layout_of("bshd"))
    tensor = adaptor.build_attn_mask(request).tensor
    assert not tensor.all(-1).any()
    real = tensor[0, 0, : LENGTHS[0], : LENGTHS[0]]
    assert torch.equal(real, torch.ones_like(real).triu(1))


def test_recurrent_layers_get_their_own_map(adaptor):
    traits = ModelTraits(linear_attention=True)
    request = MaskRequest("bshd", traits, ParallelSizes(), frozenset({NONE, FULL}), layout_of("bshd"))
    mask = adaptor.build_attn_mask(request)
    assert mask.tensor is None
    assert mask.linear_attn_mask.sum(1).tolist() == LENGTHS


@pytest.mark.parametrize(
    ("traits", "word"), [(ModelTraits(window=(8, 0)), "window"), (ModelTraits(causal=False), "not causal")]
)
def test_what_mindspeed_cannot_attend_is_refused(adaptor, traits, word):
    with pytest.raises(HookContractError) as caught:
        adaptor.build_attn_mask(MaskRequest("thd", traits, ParallelSizes(), frozenset({NONE})))
    assert word in caught.value.why


# ---- the side channel -----------------------------------------------------------------------------------


@pytest.fixture
def mindspeed_globals(monkeypatch):
    """Modules with MindSpeed's globals; that the real ones have them is tested with the real ones."""
    for name, attribute in process_state.GLOBALS:
        module = sys.modules.get(name) or ModuleType(name)
        setattr(module, attribute, None)
        monkeypatch.setitem(sys.modules, name, module)
    return lambda: [getattr(sys.modules[name], attribute) for name, attribute in process_state.GLOBALS]


def inputs_of(lengths, format="thd"):
    layout = plan_layout(torch.tensor(lengths), format=format, constraints=LayoutConstraints(align=4))
    ids = torch.zeros(layout.shape, dtype=torch.int64)
    return ModelInputs(layout=layout, input_ids=ids, position_ids=layout.position_ids, labels=ids)


def test_lengths_and_positions_live_as_long_as_their_micro_batch(adaptor, mindspeed_globals):
    inputs = adaptor.preprocess_sequences(inputs_of(LENGTHS))
    assert mindspeed_globals() == [None] * 3
    with scopes.enter(inputs.scope):
        first, second, positions = mindspeed_globals()
        assert first.tolist() == second.tolist() == [4, 12]  # padded, cumulative, no leading 0
        assert positions.flatten().tolist() == [0, 1, 2, 3, *range(8)]
    assert mindspeed_globals() == [None] * 3


def test_rows_have_their_positions_in_columns(adaptor, mindspeed_globals):
    with scopes.enter(adaptor.preprocess_sequences(inputs_of(LENGTHS, "bshd")).scope):
        assert mindspeed_globals()[2].T.tolist() == [[*range(8)], [*range(8)]]


def test_a_recomputation_inside_another_micro_batch_sees_its_own(adaptor, mindspeed_globals):
    outer, inner = (adaptor.preprocess_sequences(inputs_of(lengths)).scope for lengths in (LENGTHS, [2]))
    with scopes.enter(outer):
        with scopes.enter(inner):
            assert mindspeed_globals()[0].tolist() == [4]
        assert mindspeed_globals()[0].tolist() == [4, 12]


# ---- how attention is called ----------------------------------------------------------------------------


@dataclass
class Packed:
    """What of Megatron's PackedSeqParams concerns attention."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    cu_seqlens_q_padded: torch.Tensor
    cu_seqlens_kv_padded: torch.Tensor


def called(mode, packed=None):
    """Call a wrapped forward in a micro-batch with a mask of this mode; give the config and what arrived."""
    arrived = {}

    def forward(self, *_, **named):
        arrived.update(named)

    module = SimpleNamespace(config=SimpleNamespace(sparse_mode=None, attention_mask_type=None))
    mask = AttnMask(NONE, mode)
    with scope_of(mask)():
        call_as_documented(forward)(module, None, None, None, None, None, packed_seq_params=packed)
    return module.config, arrived


def test_the_mode_goes_with_the_mask_call_by_call():
    for mode, number, words in (("sparse_mode=1", 1, "general"), ("sparse_mode=2", 2, "causal")):
        config, _ = called(mode)
        assert (config.sparse_mode, config.attention_mask_type) == (number, words)


def test_packed_sequences_are_told_by_their_ends_in_the_buffer():
    real, padded = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 4, 12], dtype=torch.int32)
    packed = Packed(real, real, padded, padded)
    _, arrived = called("sparse_mode=2", packed)
    assert arrived["packed_seq_params"].cu_seqlens_q.tolist() == [4, 12]
    assert packed.cu_seqlens_q is real  # the rotary embedding goes on reading these


def test_a_call_outside_of_a_micro_batch_is_an_error():
    with pytest.raises(PlatformError, match="without a mask that its kernel can use"):
        call_as_documented(lambda *_, **__: None)(SimpleNamespace(), None, None, None, None)


def test_the_platform_asks_the_adaptor():
    platform = AscendPlatform()
    platform.configure_options(AscendOptions(adaptor="mindspeed"))
    request = MaskRequest("thd", ModelTraits(), ParallelSizes(), frozenset({NONE}))
    assert hooks_of(platform).build_attn_mask(request).kernel_mode == "sparse_mode=2"

"""The adaptor's answers that need no MindSpeed-LLM."""

import json

import pytest
import torch

from anytron.base.errors import ConfigError, PlatformError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.config.schema import RunConfig, default_run
from anytron.device.loading import check_requirements, hooks_of, open_session
from anytron.device.platform import decisions_of
from anytron.sequences.masks import MaskKind, MaskRequest
from anytron_ascend import AscendPlatform
from anytron_ascend.adaptors.mindspeed_llm import MindSpeedLlmAdaptor
from anytron_ascend.mindspeed_llm import installation
from anytron_ascend.mindspeed_llm.installation import find_installation
from anytron_ascend.options import AscendOptions
from anytron_megatron.plugin import MegatronBackend

QWEN3 = {"model_type": "qwen3", "vocab_size": 97}


def run_of(**sections) -> RunConfig:
    known = {
        "model": {"config": QWEN3, "tokenizer": "unused"},
        "data": {"source": "unused"},
        "rewards": [{"function": "unused"}],
        "engine": {"name": "mindspeed_llm"},
    }
    return RunConfig.model_validate({**known, **sections})


def platform_of(engine: str, **options: str) -> AscendPlatform:
    platform = AscendPlatform()
    platform.engine = engine
    platform.configure_options(AscendOptions(**options))
    return platform


@pytest.fixture
def checkouts(tmp_path, monkeypatch):
    """Put packages of some versions on the path: what is looked for, without what is in it."""

    def write(
        mindspeed: str = "0.12.1", megatron: str = "0.12.1", known: str = "0.12.1", training: bool = True
    ) -> None:
        for package in ("mindspeed_llm", "mindspeed", "megatron/core", *(["megatron/training"] if training else [])):
            (tmp_path / package).mkdir(parents=True)
            (tmp_path / package / "__init__.py").write_text("raise ImportError('it is not imported to be found')\n")
        major, minor, patch = megatron.split(".")
        (tmp_path / "megatron/core/package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n")
        (tmp_path / "setup.py").write_text(f"__version__ = '{mindspeed}'\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        # `megatron` has been imported from elsewhere; the parent of a namespace is not looked for again.
        monkeypatch.delitem(__import__("sys").modules, "megatron", raising=False)
        monkeypatch.setattr(installation, "version", lambda _: known)

    return write


def test_its_absence_is_an_error_with_the_steps_to_install_it(monkeypatch):
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    with pytest.raises(PlatformError, match="MindSpeed-LLM is not installed") as caught:
        find_installation()
    assert "git clone -b 26.1.0 https://gitcode.com/Ascend/MindSpeed-LLM" in caught.value.fix
    assert "pip install --no-deps megatron-core==0.12.1 mbridge" in caught.value.fix


def test_the_three_are_found_without_importing_them(checkouts):
    checkouts()
    assert find_installation().megatron == "0.12.1"


def test_megatron_core_alone_is_not_enough(checkouts):
    checkouts(training=False)
    with pytest.raises(PlatformError, match="Megatron-LM is not installed"):
        find_installation()


@pytest.mark.parametrize("found", [{"mindspeed": "0.16.0"}, {"megatron": "0.16.1"}])
def test_what_does_not_belong_together_is_refused(checkouts, found):
    checkouts(**found)
    with pytest.raises(PlatformError, match="are of different releases"):
        find_installation()


def test_another_megatron_among_the_installed_packages_is_refused(checkouts):
    checkouts(known="0.16.1")
    with pytest.raises(PlatformError, match="does not match the package") as caught:
        find_installation()
    assert caught.value.fix == "pip install --no-deps megatron-core==0.12.1"


def findings(config, **options):
    return {one.key: one for one in platform_of(config.engine.name, **options).configure(config)}


def test_the_engine_implies_the_adaptor():
    assert "platform.options.adaptor" not in findings(run_of())
    for adaptor in ("none", "mindspeed"):
        found = findings(run_of(), adaptor=adaptor)["platform.options.adaptor"]
        assert (found.severity, f"set to {adaptor}, but the engine mindspeed_llm" in found.message) == ("error", True)
    assert platform_of("megatron").portable_modules
    assert not platform_of("megatron", adaptor="mindspeed").portable_modules


def test_whose_modules_there_are_is_said_with_the_reason():
    for platform, modules in (
        (platform_of("megatron"), "portable (platform.options.adaptor=none is the default)"),
        (platform_of("megatron", adaptor="mindspeed"), "mindspeed (platform.options.adaptor=mindspeed is set)"),
        (platform_of("mindspeed_llm"), "mindspeed_llm (the engine mindspeed_llm has its own modules)"),
    ):
        assert [str(one) for one in decisions_of(platform)] == [f"modules: {modules}"]


def test_the_engine_is_not_named_twice():
    with pytest.raises(ConfigError, match=r"engine\.name=mindspeed_llm selects this adaptor") as caught:
        open_session("ascend", {"adaptor": "mindspeed_llm"}, "mindspeed_llm")
    assert caught.value.where == "platform.options.adaptor"


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("parallel.context_parallel_size", {"parallel": {"context_parallel_size": 2}}),
    ],
)
def test_what_it_would_leave_out_is_refused_before_anything_starts(key, sections):
    assert findings(run_of(**sections))[key].severity == "error"


@pytest.mark.parametrize(
    ("key", "model", "sections"),
    [
        ("parallel.pipeline_model_parallel_size", {}, {"parallel": {"pipeline_model_parallel_size": 5}}),
        ("parallel.tensor_model_parallel_size", {}, {"parallel": {"tensor_model_parallel_size": 5}}),
        ("parallel.expert_model_parallel_size", {}, {"parallel": {"expert_model_parallel_size": 2}}),
        (
            "parallel.expert_model_parallel_size",
            {"model_type": "qwen3_moe", "num_experts": 6},
            {"parallel": {"data_parallel_size": 4, "expert_model_parallel_size": 4}},
        ),
        ("engine.distributed_optimizer", {}, {"optimizer": {"name": "sgd"}}),
        ("rollout.max_new_tokens", {"max_position_embeddings": 64}, {"rollout": {"max_new_tokens": 64}}),
    ],
)
def test_what_megatron_would_refuse_in_every_rank_is_refused_before(key, model, sections):
    config = run_of(model={"config": {**QWEN3, **model}, "tokenizer": "unused"}, **sections)
    assert findings(config)[key].severity == "error"


def test_a_critic_of_another_shape_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": 2}))
    (tmp_path / "model.safetensors").touch()
    critic = {"algorithm": {"advantage": "gae"}, "critic": {"path": str(tmp_path)}}
    found = findings(run_of(**critic))["critic.path"]
    assert (found.severity, "num_layers" in found.message) == ("error", True)
    assert "critic.path" not in findings(run_of(**{**critic, "critic": {}}))


def test_it_needs_other_packages_than_the_engine_megatron():
    platform = platform_of("mindspeed_llm")
    hooks = hooks_of(platform, {"megatron": MegatronBackend()})
    needed = {need.package: need.specifier for _, need in hooks.requirements("mindspeed_llm")}
    assert needed["megatron-core"] == "==0.12.1"
    assert "mcore-bridge" not in needed
    with pytest.raises(Exception, match="megatron-core"):
        check_requirements(hooks, "mindspeed_llm")  # this environment's is another


def test_every_process_starts_with_what_megatron_requires():
    assert platform_of("mindspeed_llm").runtime_env(default_run())["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in platform_of("megatron").runtime_env(default_run())


def test_no_mask_and_the_mode_of_each_format():
    for layout, mode in (("thd", "sparse_mode=4"), ("bshd", "sparse_mode=2")):
        request = MaskRequest(layout, ModelTraits(causal=True), ParallelSizes(), frozenset({MaskKind.NONE}))
        mask = MindSpeedLlmAdaptor().build_attn_mask(request)
        assert (mask.kind, mask.kernel_mode, mask.tensor) == (MaskKind.NONE, mode, None)


def test_the_options_of_the_platform_are_typed():
    with pytest.raises(ConfigError, match="adaptor"):
        open_session("ascend", {"adaptor": "mind_speed"})
    assert not platform_of("mindspeed_llm").portable_modules
    assert torch.npu.is_available()

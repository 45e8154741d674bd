"""The estimate of a run's memory against engines that are really built, and models that transformers builds."""

import math
import re

import pytest
import torch

from anytron.config.load import load_config
from anytron.config.schema import RunConfig
from anytron.proof.verification.weights import stored_weights
from anytron.task.data.model_files import CHOSEN_EXPERTS, EXPERT_COUNTS
from anytron.task.data.pretrained import model_class
from anytron.workers.engines.estimates import MemoryPart, peak
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.checks.subject import Subject
from anytron_megatron.estimate.memory import Held, optimizer_bytes, sharing_ranks
from anytron_megatron.estimate.run import estimate
from anytron_megatron.estimate.tensors import chosen_share, model_shapes, pieces
from anytron_megatron.options import MegatronOptions
from tests.backends.megatron.families.layouts import PUBLISHED_MODELS
from tests.backends.megatron.ranks import engine_config
from tests.house import ROOT

ADAM = {"name": "adam", "lr": 1e-3}


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_those_of_transformers(family, tiny_family):
    """The whole model, on one rank."""
    from transformers import AutoConfig

    fields = dict(CONFIGS[family])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    run = engine_config(tiny_family(family), tiny_family(family))
    assert estimate(run).parameters == sum(parameter.numel() for parameter in model.parameters())


def whole(run: RunConfig) -> tuple[int, int, int]:
    """Numbers of the model, and bytes of optimizer state before and after the first update, of all ranks together.

    The engine counts over all ranks, the estimate for each pipeline stage: a stage has tensor x context x data ranks.
    """
    sizes, policy = MegatronOptions.of(run).sizes(run), Subject.policy(run)
    split = list(pieces(model_shapes(policy, predicts_ahead=False), policy.text, sizes))
    same = sizes.tensor * sizes.context * sizes.data
    replicas = sharing_ranks(sizes, distributed=run.engine.distributed_optimizer)
    count = state = 0
    for stage in range(sizes.pipeline):
        held = Held.of(piece for piece in split if piece.stage == stage)
        count += held.total * same
        state += optimizer_bytes(held, run.optimizer, dtype=run.model.dtype, replicas=replicas) * same
    element = 4 if run.model.dtype == "float32" else 2
    master = 0 if element == 4 else state // 3
    return count * element, master, state


LAYOUTS = {
    "one": ("qwen3", {}),
    "tensor": ("qwen3", {"parallel": {"tensor_model_parallel_size": 2}}),
    "pipeline": ("qwen3", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "tied-pipeline": ("qwen3_tied", {"parallel": {"pipeline_model_parallel_size": 2}}),
    "biases": ("qwen2_5", {"parallel": {"tensor_model_parallel_size": 2}}),
    "replicas": ("qwen3", {"parallel": {"data_parallel_size": 2}}),
    "experts": ("qwen3_moe", {"parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2}}),
    "experts-tensor": ("qwen3_moe", {"parallel": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}}),
    "latent": ("deepseek_v3", {"parallel": {"tensor_model_parallel_size": 2}}),
    "recurrent": ("qwen3_next", {"parallel": {"tensor_model_parallel_size": 2}}),
    "vision": ("qwen2_5_vl", {"parallel": {"tensor_model_parallel_size": 2}}),
    "vision-pipeline": ("qwen3_vl", {"parallel": {"pipeline_model_parallel_size": 2}}),
}

BUFFERS = {"latent": 2 * 3 * (16 + 16), "vision": 2 * 32, "vision-pipeline": 32}
"""Bytes of the reference that are no parameters: each router's expert biases and counts of tokens, float32 for four
experts; the frequencies of a vision tower. All others have none."""


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("layout", "dtype", "shared"),
    [
        *((layout, "float32", False) for layout in LAYOUTS),
        ("one", "bfloat16", False),
        ("replicas", "bfloat16", True),
        ("experts", "bfloat16", True),
    ],
)
def test_parameters_and_optimizer_state_are_exactly_what_is_allocated(
    layout, dtype, shared, tiny_family, ranks, recorded, recorded_images, policy_loss
):
    """The engine gives them back to the device and says how many bytes those were; the reference is the parameters."""
    from anytron.run.trainer.updates import UpdatePlan

    family, sections = LAYOUTS[layout]
    directory = tiny_family(family)
    engine = {"offload": ["optimizer", "reference"], "distributed_optimizer": shared}
    workers, run = ranks.engine(
        directory,
        **sections,
        model={"path": str(directory), "dtype": dtype},
        engine=engine,
        optimizer=ADAM,
        algorithm={"kl_coefficient": 0.1},
    )
    parameters, master, state = whole(run)
    before = workers.offload()["memory/offloaded_bytes"]
    batch = recorded_images if "vision" in layout else recorded
    workers.update(batch, UpdatePlan.from_config(run, workers.topology[0]), policy_loss)
    after = workers.offload()["memory/offloaded_bytes"]
    parameters += BUFFERS.get(layout, 0)
    assert (before, after) == (parameters + master, parameters + state)


@pytest.mark.slow
def test_gradient_buffers_are_filled_up_by_little(tiny_family, ranks):
    workers, run = ranks.engine(tiny_family("qwen3"), engine={"offload": ["gradients"]})
    found = {part.name: part for part in estimate(run).parts}
    assert workers.offload()["memory/offloaded_bytes"] == pytest.approx(found["gradients"].size, rel=0.02)
    assert found["gradients"].when == "training", "they leave the device"


@pytest.mark.parametrize("name", ["internvl3_5", "minicpmv4_6", "qwen3_omni_moe"])
def test_a_tower_that_gets_no_images_has_no_gradients_and_a_talker_is_not_there(name, tiny_family):
    directory = tiny_family(name)
    (model,) = (one for one in PUBLISHED_MODELS if one.name == name)
    sizes = {name: tensor.numel() for name, tensor in stored_weights(directory).items()}
    trained = sum(size for name, size in sizes.items() if not re.search(model.still, name))
    found = estimate(engine_config(directory, directory))
    parts = {part.name: part.size for part in found.parts}
    assert found.parameters == sum(sizes.values()) > trained
    assert parts["gradients"] == 4 * trained


QWEN3_8B = {"path": str(ROOT / "examples" / "models" / "Qwen3-8B")}


def large(**sections) -> dict[str, MemoryPart]:
    run = RunConfig.model_validate(
        {
            "model": QWEN3_8B,
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            **sections,
        }
    )
    found = estimate(run)
    assert found.parameters == 8_190_735_360, "of the published model"
    return {part.name: part for part in found.parts}


def test_a_published_model_has_its_published_size_and_18_bytes_for_each_parameter():
    """Megatron-Core's page on the distributed optimizer: bf16 parameters, fp32 gradients: 18, or 6 + 12 / d."""
    parts = large(engine={"distributed_optimizer": False})
    count = 8_190_735_360
    assert [parts[name].size for name in ("parameters", "gradients", "optimizer")] == [2 * count, 4 * count, 12 * count]
    shared = large(parallel={"data_parallel_size": 8})
    assert shared["optimizer"].size == math.ceil(12 * count / 8)


def test_recomputation_parallelism_and_offload_change_what_they_should():
    plain = large()
    assert large(engine={"recompute": "full"})["activations"].size < plain["activations"].size / 8
    split = large(parallel={"tensor_model_parallel_size": 4})
    assert split["activations"].size == pytest.approx(plain["activations"].size / 4, rel=0.01)
    assert split["parameters"].size == pytest.approx(plain["parameters"].size / 4, rel=0.01)
    halved = large(engine={"max_tokens_per_micro_batch": 8192})
    assert halved["activations"].size == pytest.approx(plain["activations"].size / 2, rel=0.01)
    context = large(parallel={"context_parallel_size": 2})
    assert context["activations"].size == halved["activations"].size
    away = large(engine={"offload": ["optimizer"]})
    assert (plain["optimizer"].when, away["optimizer"].when) == ("always", "training")
    assert "reference" not in plain
    assert large(algorithm={"kl_coefficient": 0.1})["reference"].size == plain["parameters"].size
    adapters = large(model={**QWEN3_8B, "lora": {"rank": 16}})
    assert adapters["optimizer"].size < plain["optimizer"].size / 100


def test_a_model_that_nobody_can_count_is_said_to_be_one(tmp_path):
    from anytron.base.errors import ConfigError

    run = engine_config(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json\n  why: the file does not exist"):
        estimate(run)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be listed before it is built"):
        estimate(run)


def test_the_peak_is_the_larger_phase():
    parts = [MemoryPart("a", 5, ""), MemoryPart("b", 3, "", "training"), MemoryPart("c", 4, "", "generation")]
    assert peak(parts) == 9


def test_activations_are_about_what_autograd_keeps(tiny_family):
    """Of a layer of transformers with fused attention, by the tensors that it saves; each storage once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**CONFIGS["qwen3"], "hidden_size": 128, "intermediate_size": 384}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = 64
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(torch.zeros(1, tokens, dtype=torch.int64)).last_hidden_state
    run = RunConfig.model_validate(
        {
            "model": {"config": {**CONFIGS["qwen3"], **fields}, "tokenizer": "unused", "dtype": "float32"},
            "engine": {"max_tokens_per_micro_batch": tokens},
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
        }
    )
    (estimated,) = (part.size for part in estimate(run).parts if part.name == "activations")
    assert kept.requires_grad
    assert 0.6 < estimated / sum(saved.values()) < 1.4


def test_examples_have_an_estimate(request):
    for file in sorted((request.config.rootpath / "examples").glob("grpo_*.yaml")):
        run = load_config(file)
        if Subject.policy(run).config.get("model_type") in ("qwen3", "qwen3_moe", "deepseek_v3"):
            assert peak(estimate(run).parts) > 0


@pytest.mark.parametrize("experts", EXPERT_COUNTS)
@pytest.mark.parametrize("chosen", CHOSEN_EXPERTS)
def test_experts_and_chosen_ones_are_counted_under_each_name(experts, chosen):
    assert chosen_share({experts: 8, chosen: 2}) == 0.25
    assert chosen_share({}) == chosen_share({experts: None, chosen: None}) == 1


def test_a_cap_of_the_logits_needs_a_third_tile():
    def log_probs(*overrides: str) -> MemoryPart:
        run = load_config(ROOT / "examples" / "grpo_sort.yaml", list(overrides))
        (found,) = [part for part in estimate(run).parts if part.name == "log-probs"]
        return found

    plain, capped = log_probs(), log_probs("model.config.final_logit_softcapping=30.0")
    run = load_config(ROOT / "examples" / "grpo_sort.yaml")
    entries, tokens = run.model.config["vocab_size"], run.engine.max_tokens_per_micro_batch
    assert capped.size - plain.size == 4 * entries * tokens, "the vocabulary fits in one tile"

"""The routing of the rollout, replayed in training: against Hugging Face's model with its routers forced, float32."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from anytron.base.errors import EngineError
from anytron.proof.verification.weights import stored_weights
from anytron.run.trainer.experience import assemble
from anytron.sequences.batch import TokenOutputs
from anytron.task.rewards.sample import Sample
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron_conformance.tiny_models import VOCABULARY, write_tiny_model
from tests.backends.megatron.families.observe import largest, relative_difference
from tests.backends.rollout.conftest import engine_for, generate, run_config, write_weights

FAMILIES = {
    "qwen3_moe": {"num_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},  # layer 0 is dense
}
LAYERS, EXPERTS, CHOSEN = {"qwen3_moe": 4, "deepseek_v3": 3}, 8, 2
LEARNING_RATE = 1000.0
"""Large: the gradient is the difference of the weights before and after an update, and those are rounded."""
BIAS, BIAS_RATE = "e_score_correction_bias", 0.01

TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2, "expert_model_parallel_size": 2}
PIPELINE = {
    "parallel": {"pipeline_model_parallel_size": 2},
    "options": {"virtual_pipeline_model_parallel_size": 2},
    "engine": {"recompute": "full"},
}
LAYOUTS = {
    "packed": {},
    "padded, recomputed": {"engine": {"sequence_format": "bshd", "recompute": "full"}},
    "TP2, EP2, recomputed": {
        "parallel": {**TENSOR, "expert_model_parallel_size": 2},
        "engine": {"recompute": "full"},
    },
    "PP2 x VPP2, recomputed": PIPELINE,
    "CP2, EP2": {"parallel": CONTEXT},
    "CP2, EP2, padded": {"parallel": CONTEXT, "engine": {"sequence_format": "bshd"}},
    "DP2, EP2": {"parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2}},
    "TP2, ETP2, padded": {
        "parallel": {**TENSOR, "expert_tensor_parallel_size": 2},
        "engine": {"sequence_format": "bshd"},
    },
    "TP2, DP2, EP4": {"parallel": {**TENSOR, "data_parallel_size": 2, "expert_model_parallel_size": 4}},
}
QUICK = {
    "qwen3_moe": ("packed", "padded, recomputed", "TP2, EP2, recomputed", "PP2 x VPP2, recomputed"),
    "deepseek_v3": ("packed", "TP2, EP2, recomputed"),
}
CASES = [
    pytest.param(family, layout, marks=[] if layout in QUICK[family] else [pytest.mark.slow])
    for family in FAMILIES
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    return cache(lambda family: write_tiny_model(family, tmp_path_factory.mktemp(family), **FAMILIES[family]))


@pytest.fixture(scope="module")
def batch_of(recorded):
    """The recorded trajectories with a random routing, which is not that of the model's routers."""

    def batch(family):
        scores = torch.rand(recorded.num_tokens, LAYERS[family], EXPERTS, generator=torch.Generator().manual_seed(7))
        routing = scores.topk(CHOSEN).indices.to(torch.uint8)
        routing[recorded.lengths.cumsum(0) - 1] = 0  # a rollout has no row for the last token
        return dataclasses.replace(recorded, routing=routing)

    return cache(batch)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What Hugging Face's model says of the trajectories, its routers forced.

    Attributes:
        log_probs: float32 ``[T]``.
        unforced: The same with the routers' own choices.
        rerouted: Share of the choices of tokens that predict a response token that are not the routers' own.
        gradients: By the names of published files.
        bias_steps: By layer, the sign of each expert's lack of tokens.
    """

    log_probs: torch.Tensor
    unforced: torch.Tensor
    rerouted: float
    gradients: dict[str, torch.Tensor]
    bias_steps: list[torch.Tensor]


class Forced:
    """Hugging Face's model, sequence by sequence, with its routers forced."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.routing, self.chosen, self.differ = None, [], []
        sparse = [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        for column, block in enumerate(sparse):
            block.gate.forward = self.forced(block.gate, column)

    def forced(self, gate, column):
        original, config = gate.forward, self.model.config

        def forward(hidden):
            logits, weights, own = original(hidden)
            if self.routing is None:
                return logits, weights, own
            experts = torch.cat([self.routing[:-1, column].long(), own[-1:]])
            probs = logits.sigmoid() if config.model_type == "deepseek_v3" else logits.softmax(-1)
            weights = probs.gather(1, experts)
            weights = weights / weights.sum(-1, keepdim=True) * getattr(config, "routed_scaling_factor", 1.0)
            self.chosen.append(experts)
            self.differ.append((own.sort(-1).values != experts.sort(-1).values).any(-1))
            return logits, weights, experts

        return forward

    def outputs(self, part):
        """Log-probs and entropies of one sequence, and where its routers would have chosen otherwise: ``[L, T]``."""
        self.chosen, self.differ = [], []
        log_softmax = self.model(part.tokens[None]).logits[0, :-1].log_softmax(-1)
        zero = torch.zeros(1)
        log_probs = torch.cat([zero, log_softmax.gather(1, part.tokens[1:, None])[:, 0]])
        return TokenOutputs(log_probs, torch.cat([zero, -(log_softmax.exp() * log_softmax).sum(-1)]))


@pytest.fixture(scope="module")
def truth_of(directory_of, batch_of, policy_loss, tmp_path_factory):
    @cache
    def truth(family):
        forced, batch = Forced(directory_of(family)), batch_of(family)
        log_probs, unforced, rerouted, loss = [], [], 0.0, 0.0
        counts = torch.zeros(LAYERS[family], EXPERTS)
        for index in range(batch.num_sequences):
            part = batch.select(torch.tensor([index]))
            forced.routing = None
            with torch.no_grad():
                unforced.append(forced.outputs(part).log_probs * part.response_mask)
            forced.routing = part.routing
            outputs = forced.outputs(part)
            log_probs.append(outputs.log_probs.detach() * part.response_mask)
            loss = loss + policy_loss(outputs, part).loss
            differ = torch.stack(forced.differ).float().mean(0)
            rerouted += float((part.token_shares[1:] * differ[:-1]).sum())
            counts += torch.stack([torch.bincount(each.flatten(), minlength=EXPERTS) for each in forced.chosen])
        loss.backward()
        for parameter in forced.model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        folder = tmp_path_factory.mktemp("gradients")
        forced.model.save_pretrained(folder)  # under the names of published files
        gradients = {
            name: values for name, values in load_file(folder / "model.safetensors").items() if BIAS not in name
        }
        steps = list(torch.sign(counts.mean(-1, keepdim=True) - counts))
        return Truth(torch.cat(log_probs), torch.cat(unforced), rerouted, gradients, steps)

    return truth


@pytest.fixture
def compute(start_engine, directory_of, policy_loss):
    """Score a batch in a layout, and update on it: log-probs, metrics, gradients, how far expert biases move."""

    def run(family, batch, engine=None, options=None, **sections):
        transformer = {"moe_router_bias_update_rate": BIAS_RATE} if family == "deepseek_v3" else {}
        options = {"transformer": transformer, **(options or {})}
        with start_engine(
            model={"path": str(directory_of(family))},
            rollout={"replay_routing": True},
            optimizer={"lr": LEARNING_RATE, "clip_grad": 0.0},
            engine={"options": options, **(engine or {})},
            **sections,
        ) as (workers, updates, output):
            assert not updates.needs_old_log_probs, "a single update replays the rollout without a pass before it"
            shape = workers.topology[0].rollout_routing
            assert (shape.layers, shape.chosen, shape.experts) == (LAYERS[family], CHOSEN, EXPERTS)
            scored = workers.token_outputs(batch, updates, "policy")
            assert scored.routing is None
            metrics = workers.update(batch, updates, policy_loss)
            workers.export_weights(str(output / "after.safetensors"))
        before = load_file(directory_of(family) / "model.safetensors")
        moved = {name: before[name] - after for name, after in load_file(output / "after.safetensors").items()}
        biases = {name: -moved.pop(name) for name in list(moved) if BIAS in name}
        return scored.log_probs, metrics, {name: by / LEARNING_RATE for name, by in moved.items()}, biases

    return run


@pytest.mark.some(2)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_training_computes_with_the_experts_of_the_rollout(family, layout, compute, truth_of, batch_of):
    truth = truth_of(family)
    log_probs, metrics, gradients, biases = compute(family, batch_of(family), **LAYOUTS[layout])
    assert largest(log_probs - truth.log_probs) <= 1e-5
    assert gradients.keys() == truth.gradients.keys()
    assert relative_difference(gradients, truth.gradients) <= 1e-4
    assert metrics["moe/rerouted_fraction"] == pytest.approx(truth.rerouted, abs=1e-6)
    for (_, moved), step in zip(sorted(biases.items()), truth.bias_steps, strict=False):
        torch.testing.assert_close(moved, BIAS_RATE * step, atol=1e-7, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routing_that_is_forced_is_not_the_routers_own(family, truth_of):
    """Otherwise agreement would prove nothing."""
    truth = truth_of(family)
    assert largest(truth.log_probs - truth.unforced) > 1e-2
    assert truth.rerouted > 0.5


def test_routing_that_is_one_token_off_is_noticed(compute, truth_of, batch_of):
    batch, truth = batch_of("qwen3_moe"), truth_of("qwen3_moe")
    starts = batch.lengths.cumsum(0) - batch.lengths
    before = torch.arange(len(batch.tokens)) - 1
    before[starts] = starts  # of the same sequence: the last token of another has no routing
    late = dataclasses.replace(batch, routing=batch.routing[before])
    log_probs, _, gradients, _ = compute("qwen3_moe", late)
    assert largest(log_probs - truth.log_probs) > 1e-3
    assert relative_difference(gradients, truth.gradients) > 1e-2


def test_the_reference_routes_for_itself_and_a_batch_without_routing_is_refused(
    start_engine, directory_of, truth_of, batch_of
):
    batch = batch_of("qwen3_moe")
    with start_engine(
        model={"path": str(directory_of("qwen3_moe"))},
        rollout={"replay_routing": True},
        algorithm={"kl_coefficient": 0.05},
    ) as (workers, updates, _):
        log_probs = workers.score(batch, updates, "reference")
        with pytest.raises(EngineError, match="no routing to replay"):
            workers.score(dataclasses.replace(batch, routing=None), updates, "policy")
    assert largest(log_probs - truth_of("qwen3_moe").unforced) <= 1e-5


SILENT = "lambda original: lambda self, *a, **k: (vars(self).update(router_replay=None), original(self, *a, **k))[1]"


def test_a_router_that_does_not_ask_is_an_error(start_engine, directory_of, batch_of, compute, write_extension):
    """Whether its choice would be recorded, for a second update, or replayed."""
    write_extension("megatron.core.transformer.moe.router:TopKRouter.routing", SILENT)
    with pytest.raises(EngineError, match="A router did not ask which experts to choose"):
        compute("qwen3_moe", batch_of("qwen3_moe"))
    settings = {
        "model": {"path": str(directory_of("qwen3_moe"))},
        "engine": {"options": {"router_replay": "old-log-probs"}},
    }
    with (
        start_engine(**settings) as (workers, updates, _),
        pytest.raises(EngineError, match="A router did not ask which experts to choose"),
    ):
        workers.token_outputs(batch_of("qwen3_moe"), updates, "policy")


def rolled_out_by(directory, dtype, scratch):
    """Let the engine transformers make responses, with their routing."""
    engine = engine_for(run_config({"path": str(directory), "dtype": dtype}, replay_routing=True))
    weights = stored_weights(directory)
    engine.load_weights(write_weights(scratch / "policy.safetensors", weights))
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 1, 9, 5, 12, 2, 7, 4)
    prompts = [PromptInputs(tuple(torch.randint(3, 119, (n,), generator=generator).tolist())) for n in lengths]
    sampling = SamplingParams(max_new_tokens=24, end_token_ids=tuple(range(8)), pad_token_id=0)
    groups = generate(engine, prompts, sampling, seed=2, samples=8)
    samples = [
        Sample("", "", "", prompt.tokens, response.tokens, response.log_probs, False, {}, routing=response.routing)
        for prompt, group in zip(prompts, groups, strict=True)
        for response in group
    ]
    batch = assemble(samples, 1.0)
    assert int(batch.tokens.max()) < VOCABULARY
    shares = batch.response_mask / batch.response_mask.sum()
    return dataclasses.replace(
        batch,
        advantages=torch.where(batch.response_mask, 1.0, 0.0),
        reference_log_probs=torch.zeros(batch.num_tokens),
        loss_weights=shares,
        token_shares=shares,
    )


@pytest.fixture
def rolled_out(directory_of, tmp_path):
    return lambda family, dtype: rolled_out_by(directory_of(family), dtype, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_transformers_tells_what_megatron_would_choose(
    family, rolled_out, start_engine, directory_of, policy_loss
):
    """With the same weights in float32 both choose alike, so that the replay changes nothing."""
    batch = rolled_out(family, "float32")
    assert len(set(batch.lengths.tolist())) > 8
    with start_engine(
        model={"path": str(directory_of(family))},
        rollout={"replay_routing": True},
        engine={"max_tokens_per_micro_batch": 512},
    ) as (workers, updates, _):
        metrics = workers.update(batch, updates, policy_loss)
    assert metrics["moe/rerouted_fraction"] == 0.0
    assert metrics["rollout/log_prob_abs_diff"] <= 1e-5


def test_in_bfloat16_the_engines_choose_otherwise_and_the_replay_brings_them_together(
    rolled_out, start_engine, directory_of, policy_loss
):
    batch, found = rolled_out("qwen3_moe", "bfloat16"), []
    for replay in (True, False):
        with start_engine(
            model={"path": str(directory_of("qwen3_moe")), "dtype": "bfloat16"},
            rollout={"replay_routing": replay},
            engine={"max_tokens_per_micro_batch": 512},
        ) as (workers, updates, _):
            found.append(workers.update(batch, updates, policy_loss))
    replayed, own = found
    assert replayed["moe/rerouted_fraction"] > 0.0
    assert "moe/rerouted_fraction" not in own
    assert replayed["rollout/log_prob_abs_diff"] < own["rollout/log_prob_abs_diff"]

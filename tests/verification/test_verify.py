"""``anytron verify`` as a person runs it: what is right passes, and what is broken fails the check that is about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anytron.proof.verification.checks import CHECKS
from tests import packed_platform
from tests.reward_models import write_reward_model
from tests.third_party_platform import USABLE, install_into
from tests.verification.saboteur import with_saboteur

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo_sort.yaml"
RECURRENT, CRITIC = (ROOT / "examples" / f"{name}.yaml" for name in ("grpo_gated_delta_net", "ppo_sort"))
OF_PARTS = {
    "long-sequence": "the run's responses have at most 4 tokens, as other checks have",
    "multi-token-prediction": "the run trains no multi-token prediction modules",
    **dict.fromkeys(("balance-loss", "router-bias"), "the model has no experts"),
    **dict.fromkeys(("critic-values", "critic-gradients"), "the run has no critic"),
    "teacher-log-probs": "the run has no teacher",
    "reward-model-scores": "the run has no reward model",
    "adapters-equal-merged": "the run trains no adapters (model.lora)",
    "conversations": "the run has no environment",
}
"""Checks of what not every run has, and why they are skipped."""
OF_UPDATES = ("learning-rates", "resumed-equals-continued", "rollout-follows-updates", "empty-shares")
ROLLOUT = ("rollout-equals-training", "token-frequencies", "rollout-follows-updates")
"""Checks that compare the rollout engine with the training engine."""
MADE = {check.name for check in CHECKS} - {"recomputed-equals-kept", *OF_PARTS}
"""Checks of two ranks that keep their activations, and have no such part."""
PLUGIN = """
import torch
from anytron import hookimpl
from anytron.device.hooks.types import ConfigEdit
from anytron.kernels.attention import make_attention
from anytron.kernels.log_prob import make_log_prob
from anytron.sequences.masks import AttnMask, MaskKind
from anytron.device.patches import Patch, Phase

LAYER = "mcore_bridge.model.modules.gated_delta_net"

def forgetting(original):
    return lambda tensor, group=None: tensor

def permuting(original):
    def export(self, chunks, **how):
        for name, tensor in original(self, chunks, **how):
            yield name, tensor.flip(0) if name.endswith("layers.0.mlp.down_proj.weight") else tensor
    return export

def cut_off(kernel):
    return lambda *given: tuple(values.detach() + 0.0 * values for values in kernel(*given))

def earlier(original):
    return lambda batch, padding: original(batch, padding) - 1


def of_one_rank(original):
    def part_of(param, dim, cp_group):
        part = original(param, dim, cp_group)
        return part.detach() if cp_group.rank() else part
    return part_of


class Unfinished(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("acme: no gradient yet")

class Sabotage:
    name = "sabotage"

    @hookimpl
    def configure(self, config):
        if {packed_only}:
            return [ConfigEdit("engine.sequence_format", "thd", "there is no padded layout on this chip")]

    @hookimpl
    def log_prob_kernel(self, spec):
        kernel = make_log_prob(spec)

        def log_prob(hidden, weight, labels, temperature, group):
            log_probs, entropy = kernel(hidden, weight, labels, 1.0 if {temperature} else temperature, group)
            return log_probs, entropy * 1.04 if {entropy} else entropy

        return cut_off(log_prob) if {gradient} else log_prob

    @hookimpl
    def attention_kernel(self, spec):
        attention = make_attention(spec)

        def raising(*arguments):
            raise RuntimeError("acme: the queue is not set\\nit was never set")

        def raising_later(*arguments):
            return Unfinished.apply(attention(*arguments))

        return {{"raises": raising, "raises backwards": raising_later}}.get({attention!r})

    @hookimpl
    def build_attn_mask(self, request):
        if {mask}:
            return AttnMask(MaskKind.NONE, "padding")

    @hookimpl
    def patch_model(self, phase, context):
        if phase is not Phase.BEFORE_BUILD or context.role != "trainer":
            return []
        patches = [("megatron.core.tensor_parallel.mappings:_reduce", "sabotage:forgetting")] if {reduce} else []
        patches += [("anytron_megatron.models.bridge:BridgeSource.export", "sabotage:permuting")] if {export} else []
        patches += [(LAYER + ":get_parameter_local_cp", "sabotage:of_one_rank")] if {heads} else []
        patches += [("anytron_megatron.training.heads:scored_places", "sabotage:earlier")] if {places} else []
        return [Patch(id=f"sabotage.{{number}}", owner="sabotage", phase=phase, target=target, reason="a test",
                      replacement=replacement) for number, (target, replacement) in enumerate(patches)]
"""


@pytest.fixture
def install(tmp_path):
    """Write an extension that breaks what is named; give the environment in which it is installed."""

    def write(**broken: bool | str) -> dict[str, str]:
        off = ("mask", "reduce", "export", "packed_only", "gradient", "temperature", "entropy", "attention", "heads")
        settings: dict[str, bool | str] = {**dict.fromkeys((*off, "places"), False), **broken}
        return with_saboteur(tmp_path, PLUGIN.format(**settings))

    return write


def verify(*arguments: str, environment: dict[str, str] | None = None, example: Path = EXAMPLE):
    command = [sys.executable, "-m", "anytron", "verify", str(example), *arguments]
    done = subprocess.run(
        command, env=environment or dict(os.environ), capture_output=True, text=True, check=False, timeout=500
    )
    return done.returncode, done.stdout, done.stderr


def verify_json(*arguments: str, environment: dict[str, str] | None = None, example: Path = EXAMPLE):
    code, output, errors = verify(*arguments, "--json", environment=environment, example=example)
    assert output, errors
    report = json.loads(output)
    assert report.keys() == {"kernels", "versions", "results", "counts", "interrupted"}
    results = {result["name"]: result for result in report["results"]}
    assert list(results) == [check.name for check in CHECKS]
    return code, results, report["kernels"]


def with_status(results, status):
    return {name for name, result in results.items() if result["status"] == status}


def test_two_ranks_that_compute_right_pass_every_check():
    code, results, _ = verify_json("parallel.tensor_model_parallel_size=2")
    assert code == 0
    assert with_status(results, "passed") == MADE, results
    assert all(results[name]["difference"] <= results[name]["tolerance"] for name in MADE)
    assert results["recomputed-equals-kept"]["detail"] == "nothing is recomputed (engine.recompute)"
    assert results["export-equals-import"]["difference"] == 0


@pytest.mark.slow
def test_two_ranks_that_share_the_heads_of_a_recurrence_pass_every_check():
    code, results, _ = verify_json("parallel.context_parallel_size=2", example=RECURRENT)
    assert code == 0
    assert with_status(results, "passed") == MADE, results


@pytest.mark.slow
def test_a_critic_on_two_ranks_passes_every_check_and_is_part_of_those_of_every_run():
    code, results, _ = verify_json("parallel.tensor_model_parallel_size=2", example=CRITIC)
    assert code == 0, results
    assert with_status(results, "passed") == MADE | {"critic-values", "critic-gradients"}, results
    assert "the critic: 25 weights" in results["optimizer-update"]["detail"]
    for name in ("packed-equals-padded", "parallel-equals-single"):
        assert "critic's gradient norm" in results[name]["detail"]


TAUGHT = ("algorithm.advantage=none", "algorithm.distillation_coefficient=1.0")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of another shape, with the example's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from anytron_conformance.training.sort_task import tokenizer

    directory = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(5)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=20, **shape, **heads)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def judge(teacher, tmp_path_factory):
    """A reward model of the teacher's trunk."""
    from anytron_conformance.training.sort_task import tokenizer

    directory = write_reward_model(teacher, tmp_path_factory.mktemp("judge"))
    tokenizer().save_pretrained(directory)
    return directory


def judged(judge, **parallel):
    model = f"reward_model={json.dumps({'path': str(judge), 'parallel': parallel})}"
    return model, "rewards=[{function: reward_model}]"


@pytest.mark.slow
def test_a_teacher_and_a_reward_model_of_another_layout_are_compared_with_transformers(teacher, judge):
    models = (f"teacher.path={teacher}", *TAUGHT, *judged(judge, context_parallel_size=2))
    code, results, _ = verify_json("parallel.tensor_model_parallel_size=2", *models)
    assert code == 0, results
    assert with_status(results, "passed") == MADE | {"teacher-log-probs", "reward-model-scores"}, results
    assert results["reward-model-scores"]["detail"].startswith("8 sequences, scores from ")


@pytest.mark.slow
def test_what_a_teacher_and_a_reward_model_compute_wrongly_fails_their_own_checks(install, teacher, judge):
    """The one forgets the temperature, the other reads its score before the last token."""
    models = (f"teacher.path={teacher}", *TAUGHT, *judged(judge))
    code, results, _ = verify_json(*models, environment=install(temperature=True, places=True))
    assert code == 1
    failing = {"hf-log-probs", "teacher-log-probs", "reward-model-scores"}
    assert failing <= with_status(results, "failed"), results
    assert results["reward-model-scores"]["difference"] > 0.1


@pytest.mark.slow
def test_gradients_of_one_rank_s_heads_are_not_those_of_all(install):
    code, results, _ = verify_json(
        "parallel.context_parallel_size=2", environment=install(heads=True), example=RECURRENT
    )
    assert code == 1
    # Values are right, and what compares norms sees that two layouts have different ones.
    assert with_status(results, "failed") == {"hf-gradients", "parallel-equals-single"}, results
    assert "linear_attn" in results["hf-gradients"]["detail"]


@pytest.mark.slow
def test_a_broken_sum_over_ranks_fails_what_compares_layouts(install):
    arguments = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=false")
    code, results, _ = verify_json(*arguments, environment=install(reduce=True))
    assert code == 1
    # One rank alone needs no sum; and the ranks' copies of a weight drift apart, of which a checkpoint has one.
    failing = {"hf-logits", "hf-log-probs", "hf-gradients", *ROLLOUT, "parallel-equals-single", OF_UPDATES[1]}
    assert with_status(results, "failed") == failing, results


def test_a_wrong_mask_and_a_permuted_weight_fail_their_own_checks(install):
    code, results, kernels = verify_json(environment=install(mask=True, export=True, packed_only=True))
    assert code == 1
    assert results["mask-conformance"]["difference"] > 1
    assert "down_proj" in results["export-equals-import"]["detail"]
    # The rollout engine has the permuted weight, and gradients are exported in the same way.
    hugging_face = {"hf-logits", "hf-log-probs", "hf-gradients"}
    failing = {"mask-conformance", "export-equals-import", "saved-model", *ROLLOUT, *hugging_face}
    assert with_status(results, "failed") == failing, results
    assert {name: results[name]["detail"] for name in with_status(results, "skipped")} == {
        **OF_PARTS,
        "packed-equals-padded": "bshd is not possible for this model and layout: "
        "sabotage sets engine.sequence_format to 'thd': there is no padded layout on this chip",
        "recomputed-equals-kept": "nothing is recomputed (engine.recompute)",
        "parallel-equals-single": "the configured layout has one rank",
    }
    assert (kernels["log_prob_kernel"], kernels["attention_kernel"]) == ("sabotage", "neutral-default")


@pytest.mark.slow
def test_a_permuted_weight_fails_a_shrunk_model_too(install):
    published = ROOT / "examples" / "models" / "Qwen3-8B"
    code, out, _ = verify("--shrink", environment=install(export=True), example=published)
    assert code == 1
    assert "export-equals-import failed\n" in out
    assert out.endswith(f"the shrunk model of {published / 'config.json'}, with random weights\n")


@pytest.mark.slow
def test_a_gradient_that_is_cut_off_is_not_equal_to_itself(install):
    code, results, _ = verify_json(environment=install(gradient=True))
    assert code == 1
    assert with_status(results, "failed") == {"hf-gradients", "packed-equals-padded"}, results
    assert "gradient is 0" in results["packed-equals-padded"]["detail"]


@pytest.mark.slow
def test_a_temperature_that_is_left_out_is_seen_though_the_run_has_none(install):
    code, results, _ = verify_json(environment=install(temperature=True))
    assert code == 1
    assert with_status(results, "failed") == {"hf-log-probs", "hf-gradients"}, results
    assert results["hf-log-probs"]["difference"] > 0.1
    assert "at temperature 0.7" in results["hf-log-probs"]["detail"]
    assert results["hf-gradients"]["detail"].startswith("begin with hf-log-probs: gradients of wrong values are wrong")


@pytest.mark.slow
def test_entropies_are_compared_and_so_are_their_gradients(install):
    code, results, _ = verify_json(environment=install(entropy=True))
    assert code == 1
    assert with_status(results, "failed") == {"hf-log-probs", "hf-gradients"}, results
    assert results["hf-log-probs"]["difference"] == pytest.approx(0.04 * 2.77, rel=0.1)


def test_a_check_that_ends_a_process_does_not_take_the_others_with_it(install):
    """What needs no gradient is computed, in new processes."""
    code, results, _ = verify_json(environment=install(attention="raises backwards"))
    assert code == 1
    assert with_status(results, "failed") == {"mask-conformance", "hf-gradients", "packed-equals-padded"}, results
    checked = {"gradients-add-up", "recomputed-equals-kept", "parallel-equals-single"}
    left_out = {"optimizer-update", *checked, *OF_UPDATES, *OF_PARTS}
    assert with_status(results, "skipped") == left_out, results
    why = "this check needs the configured engine's gradients, which could not be computed in the check hf-gradients"
    assert results["optimizer-update"]["detail"] == why
    for name, method in (
        ("mask-conformance", "attention_conformance"),
        ("hf-gradients", "export_gradients"),
        ("packed-equals-padded", "update"),
    ):
        said, _, log = results[name]["detail"].partition(" (log: ")
        assert said == f"Trainer rank 0 failed in {method}(). NotImplementedError: acme: no gradient yet"
        assert "acme: no gradient yet" in Path(log.removesuffix(")")).read_text()


@pytest.mark.slow
def test_what_needs_values_that_nobody_can_compute_is_not_made(install):
    code, results, _ = verify_json(environment=install(attention="raises"))
    assert code == 1
    passed = {"prompt-order", "advantages", "loss", "export-equals-import", "saved-model", "samples-of-a-prompt"}
    assert with_status(results, "passed") == passed
    assert with_status(results, "failed") == {"mask-conformance", "hf-logits"}, results
    why = "this check needs the configured engine's log-probs, which could not be computed in the check hf-logits"
    for name in with_status(results, "skipped") - {"recomputed-equals-kept", "parallel-equals-single", *OF_PARTS}:
        assert results[name]["detail"] == why
    for name in with_status(results, "failed"):
        assert "RuntimeError: acme: the queue is not set (log: " in results[name]["detail"]


@pytest.mark.slow
def test_a_platform_with_a_kernel_mode_of_its_own_passes(tmp_path):
    """Its attention kernel also insists on what the scope of its micro-batch has set."""
    path = os.pathsep.join(install_into(tmp_path))
    code, results, _ = verify_json(environment={**os.environ, **USABLE, "PYTHONPATH": path})
    assert with_status(results, "failed") == set(), results
    assert code == 0
    assert "thd 'basalt_lengths' attends as defined" in results["mask-conformance"]["detail"]


@pytest.mark.slow
def test_a_platform_of_packed_sequences_alone_is_asked_for_no_others(tmp_path):
    """Its kernel would raise."""
    path = os.pathsep.join([*packed_platform.install_into(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, results, _ = verify_json("platform.name=packed", environment={**os.environ, "PYTHONPATH": path})
    assert code == 0, results
    assert results["packed-equals-padded"]["status"] == "skipped"
    assert results["packed-equals-padded"]["detail"] == (
        "bshd is not possible for this model and layout: the platform packed has no bshd: its queue takes no rows"
    )
    assert results["mask-conformance"]["status"] == "passed"
    assert "bshd" not in results["mask-conformance"]["detail"]


def test_a_configuration_that_cannot_run_is_refused_before_anything_starts():
    code, output, errors = verify("parallel.tensor_model_parallel_size=3", "--json")
    assert code == 1
    assert output == ""
    assert "cannot be split over 3 ranks" in errors


def test_a_signal_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "anytron", "verify", str(EXAMPLE)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("anytron-verify-*/logs/trainer-0.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "terminated by SIGTERM" in errors
    assert list(tmp_path.iterdir()) == []

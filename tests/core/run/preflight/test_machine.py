"""What cannot work on this machine is found before anything is built or started."""

import os

import pytest

from anytron.base.errors import ConfigError
from anytron.config.anchor import anchor
from anytron.config.diagnostics import refuse
from anytron.config.schema import RunConfig
from anytron.device.platform import Availability, Platform, Probe
from anytron.run.preflight.files import reference_diagnostics
from anytron.run.preflight.machine import machine_diagnostics
from anytron.run.preflight.settings import setting_diagnostics
from anytron.workers.executor.local import LocalExecutor


class Chip(Platform):
    """A device of which there are two."""

    name = "chip"
    api_version = 1

    def probe(self):
        return Probe(Availability.USABLE, "two of them", devices=2)

    def runtime(self):
        raise NotImplementedError


class Processor(Chip):
    """The same without a limit."""

    name = "processor"
    accelerator = False


PPO = {"algorithm": {"advantage": "gae"}}
JUDGED = {"rewards": [{"function": "reward_model"}]}
OPD = {"algorithm": {"advantage": "none", "distillation_coefficient": 1.0}}
"""On-policy distillation."""


@pytest.fixture
def check(tmp_path):
    (tmp_path / "functions.py").touch()

    def check(platform=None, **sections):
        platform = platform or Processor()
        values = {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "functions.py:tokenizer"},
            "data": {"source": "functions.py:prompts"},
            "rewards": [{"function": "functions.py:reward"}],
            "trainer": {"output_dir": str(tmp_path / "run")},
        }
        values |= {
            name: {**values.get(name, {}), **keys} if isinstance(keys, dict) else keys
            for name, keys in sections.items()
        }
        config = anchor(RunConfig.model_validate(values), tmp_path)
        found = [
            *setting_diagnostics(config),
            *machine_diagnostics(config, platform, platform.probe()),
            *reference_diagnostics(config),
        ]
        refuse(found)
        return [str(one) for one in found]

    return check


def test_a_sound_configuration_passes_without_a_word(check):
    assert check() == []


@pytest.mark.parametrize(
    ("sections", "key", "says"),
    [
        ({"executor": {"kind": "locale"}}, "executor.kind", "did you mean local?"),
        ({"engine": {"name": "megatorn"}}, "engine.name", "did you mean megatron?"),
        ({"rollout": {"engine": "transformer"}}, "rollout.engine", "did you mean transformers?"),
        ({"algorithm": {"mini_batches": 40}}, "algorithm.mini_batches", "40 mini-batches but only 32 prompts"),
        (
            {
                "data": {"prompts_per_step": 1},
                "rollout": {"samples_per_prompt": 2},
                "parallel": {"data_parallel_size": 3},
            },
            "parallel.data_parallel_size",
            "2 sequences, too few for 3 data-parallel replicas",
        ),
        ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel", "cannot be split over ranks"),
        ({"rollout": {"min_new_tokens": 9, "max_new_tokens": 8}}, "rollout.min_new_tokens", "9 is more than"),
        ({"rollout": {"samples_per_prompt": 1}}, "rollout.samples_per_prompt", "a single response teaches nothing"),
        (
            {"algorithm": {"advantage": "rloo"}, "rollout": {"samples_per_prompt": 1}},
            "rollout.samples_per_prompt",
            "rloo compares the responses",
        ),
        (
            {"model": {"config": {"model_type": "qwen3", "num_hidden_layers": 10**9}}},
            "model.config.num_hidden_layers",
            "a whole number from 1 to 4096, but is 1000000000",
        ),
        ({"optimizer": {"lr": 1e-5, "min_lr": 1e-4}}, "optimizer.min_lr", "0.0001 is more than"),
        ({**PPO, "critic": {"optimizer": {"lr": 1e-5, "min_lr": 1e-4}}}, "critic.optimizer.min_lr", "0.0001 is more"),
        ({**PPO, "critic": {"warmup_steps": 100}}, "critic.warmup_steps", "at most 99"),
        ({**PPO, "critic": {"path": "gone"}}, "critic.path", "there is no directory"),
        ({**OPD, "teacher": {"path": "gone"}}, "teacher.path", "there is no directory"),
        ({**JUDGED, "reward_model": {"path": "gone"}}, "reward_model.path", "there is no directory"),
        (
            {"model": {"config": {"model_type": "qwen3"}, "tokenizer": "gone"}},
            "model.tokenizer",
            "there is no directory",
        ),
        ({"model": {"processor": "gone"}}, "model.processor", "there is no directory"),
        ({"data": {"source": "gone.py:prompts"}}, "data.source", "there is no file"),
        ({"rewards": [{"function": "no_such_module.x:f"}]}, "rewards.0.function", "no module 'no_such_module.x'"),
    ],
)
def test_a_mistake_is_refused_with_its_key(check, sections, key, says):
    with pytest.raises(ConfigError) as caught:
        check(**sections)

    assert caught.value.where == key
    assert says in f"{caught.value.why} {caught.value.fix}"


@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_gspo_with_another_average_than_its_paper_s_is_warned_of(check, loss):
    assert check(algorithm={"loss": loss, "aggregation": "sequence-mean"}) == []
    for aggregation in ("token-mean", "token-sum", "length-constant"):
        (warning,) = check(algorithm={"loss": loss, "aggregation": aggregation})
        assert "algorithm.aggregation=sequence-mean" in warning
    assert check(algorithm={"loss": "ppo_clip", "aggregation": "token-mean"}) == []


def test_a_teacher_s_directory_has_weights_and_a_tokenizer(check, tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check(**OPD, teacher={"path": "teacher"})
    assert "has no weights" in str(caught.value)
    assert "has no tokenizer" in str(caught.value)
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "teacher" / file).write_text("{}")
    assert check(**OPD, teacher={"path": "teacher"}) == []


def test_a_reward_model_has_no_more_ranks_than_training_whose_devices_it_shares(check, tmp_path):
    (tmp_path / "judge").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "judge" / file).write_text("{}")
    four, two = ({"data_parallel_size": size} for size in (4, 2))
    with pytest.raises(
        ConfigError, match="4 ranks share the devices of 4 training ranks, but the run has only 2"
    ) as caught:
        check(**JUDGED, reward_model={"path": "judge", "parallel": four}, parallel=two)
    assert caught.value.where == "reward_model.parallel"
    with pytest.raises(ConfigError, match=r"reward_model\.parallel\.tensor_model_parallel_size is 1"):
        check(**JUDGED, reward_model={"path": "judge", "parallel": {"sequence_parallel": True}})
    found = check(Chip(), **JUDGED, reward_model={"path": "judge", "parallel": two}, parallel=two)
    assert not any("reward_model" in one for one in found)


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"kl_estimator": "k1"}, "the gradient of k1 is 0 in expectation"),
        ({"kl_placement": "reward"}, "k3 does not give the policy gradient of the KL divergence"),
    ],
)
def test_an_estimator_of_another_gradient_is_warned_of(check, algorithm, says):
    (warning,) = check(algorithm={"kl_coefficient": 0.1, **algorithm})
    assert says in warning
    assert check(algorithm={"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}) == []
    assert check(algorithm={"kl_coefficient": 0.1, "kl_estimator": "k2"}) == []


@pytest.mark.parametrize("rollout", [{"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.9, "top_k": 50}])
def test_a_correction_that_cannot_see_what_sampling_leaves_out_is_warned_of(check, rollout):
    truncated = {"importance_correction": "truncated"}
    (warning,) = check(algorithm=truncated, rollout=rollout)
    assert all(f"rollout.{key}={value}" in warning for key, value in rollout.items())
    assert "the rollout samples from a part" in warning
    assert any("the rollout samples from a part" in one for one in check(rollout={**rollout, "max_staleness": 1}))
    assert check(rollout=rollout) == []
    assert check(algorithm=truncated) == []


def test_replicas_are_placed_apart_where_devices_can_be_given_to_one_process_and_suffice(check, monkeypatch):
    apart = {"placement": "separate"}
    for platform in (Processor(), Chip()):
        with pytest.raises(ConfigError, match=f"{platform.name} cannot reserve devices for rollout processes"):
            check(platform, rollout=apart)
    monkeypatch.setattr(Chip, "visible_devices_variable", "CHIPS")
    check(Chip(), rollout=apart)
    with pytest.raises(ConfigError, match="chip has 2 devices, but 1 training rank and 2 replicas need"):
        check(Chip(), rollout={**apart, "replicas": 2})


def test_more_ranks_than_devices_are_refused_on_accelerators_only(check):
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}

    product = "tensor_model_parallel 2 x pipeline_model_parallel 2 x context_parallel 1 x data_parallel 1"
    with pytest.raises(ConfigError, match=f"{product} = 4 ranks, but chip has 2 devices"):
        check(Chip(), parallel=sizes)
    assert check(Chip(), parallel={"tensor_model_parallel_size": 2}) == []


def test_an_executor_of_other_machines_is_not_held_against_this_one(check, monkeypatch):
    monkeypatch.setattr(LocalExecutor, "on_this_machine", False)

    assert check(Chip(), parallel={"data_parallel_size": 4}) == []
    assert check(parallel={"data_parallel_size": len(os.sched_getaffinity(0)) + 1}) == []


def test_more_ranks_than_processors_are_a_warning(check):
    processors = len(os.sched_getaffinity(0))

    (warning,) = check(parallel={"data_parallel_size": processors + 1})

    assert f"{processors + 1} training ranks share {processors} CPUs" in warning


def test_a_model_directory_is_looked_into(check, tmp_path):
    with pytest.raises(ConfigError, match="there is no directory"):
        check(model={"path": "model", "config": None, "tokenizer": None})

    directory = tmp_path / "model"
    directory.mkdir()
    with pytest.raises(ConfigError) as caught:
        check(model={"path": "model", "config": None, "tokenizer": None})
    for missing in ("has no config.json", "has no weights", "has no tokenizer"):
        assert missing in str(caught.value)

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text("{}")
    assert check(model={"path": "model", "config": None, "tokenizer": None}) == []


def test_all_mistakes_come_at_once(check):
    with pytest.raises(ConfigError, match="2 mistakes"):
        check(executor={"kind": "none"}, data={"source": "gone.py:f"})

"""Which changes of a configuration make it another run."""

import pytest

from anytron.config.schema import RunConfig
from anytron.record.checkpoint.differences import carries_out, differences, is_free, is_identity


def values(**sections):
    given = {
        "model": {"config": {"model_type": "qwen3", "layers": 2}, "tokenizer": "t"},
        "data": {"source": "jsonl", "options": {"path": "a.jsonl"}},
        "rewards": [{"function": "exact_match"}, {"function": "length"}],
    }
    return RunConfig.model_validate(given | sections).model_dump(mode="json")


def changed(old, new):
    return [(change.key, change.old, change.new) for change in differences(old, new)]


def test_equal_configurations_have_none():
    assert changed(values(), values()) == []


def test_they_are_named_by_their_dotted_keys():
    new = values(
        model={"config": {"model_type": "qwen3", "layers": 3, "width": 8}, "tokenizer": "t"},
        rewards=[{"function": "exact_match"}, {"function": "length", "weight": 0.5}],
        checkpoint={"async": False},
    )
    assert changed(values(), new) == [
        ("model.config.layers", 2, 3),
        ("model.config.width", None, 8),
        ("rewards.1.weight", 1.0, 0.5),
        ("checkpoint.async", True, False),
    ]


def test_a_list_of_another_length_is_one_change():
    assert [key for key, _, _ in changed(values(), values(rewards=[{"function": "exact_match"}]))] == ["rewards"]


def test_a_section_that_comes_or_goes_is_a_change():
    ppo = values(critic={}, algorithm={"advantage": "gae"})
    assert [key for key, _, _ in changed(values(), ppo)] == ["algorithm.advantage", "critic"]


def test_keys_that_an_older_version_did_not_know_are_none():
    old = values()
    del old["checkpoint"], old["resume"], old["trainer"]["log_samples"]
    assert changed(old, values(checkpoint={"keep": 7})) == []


@pytest.mark.parametrize(
    "key",
    [
        "trainer.total_steps",
        "trainer.output_dir",
        "parallel.tensor_model_parallel_size",
        "tracking.plot",
        "executor.kind",
        "platform.name",
        "checkpoint.every_steps",
        "resume",
        "engine.max_tokens_per_micro_batch",
        "rollout.options.device_map",
        "rollout.replicas",
        "rollout.weights",
        "rewards.1.timeout_s",
    ],
)
def test_how_a_run_is_carried_out_may_change(key):
    assert is_free(key)
    assert carries_out(key)


@pytest.mark.parametrize("key", ["optimizer.lr", "rewards.0.weight", "algorithm.overlong_masking"])
def test_what_an_error_names_as_its_remedy_may_change_and_is_about_learning(key):
    assert is_free(key)
    assert not carries_out(key)


@pytest.mark.parametrize(
    "key",
    [
        "trainer.seed",
        "optimizer.beta1",
        "algorithm.loss",
        "data.prompts_per_step",
        "rewards.0.function",
        "rewards",
        "model.config.hidden_size",
        "engine.name",
        "engine.options.router_replay",
        "rollout.max_staleness",
        "rollout.temperature",
        "environment.path",
        "critic",
    ],
)
def test_what_it_learns_may_not(key):
    assert not is_free(key)


def test_a_new_run_may_start_from_a_checkpoint_with_another_task_and_the_same_model():
    assert not any(map(is_identity, ("data.source", "optimizer.lr", "critic.optimizer.lr", "rewards.0.weight")))
    assert all(map(is_identity, ("model.config.layers", "model.lora.rank", "critic", "trainer.seed")))


def test_every_free_key_is_one_of_the_configuration():
    """Keys that are renamed in the schema must be renamed here."""
    from anytron.record.checkpoint.differences import CARRIED_OUT, IDENTITY, NOT_FREE, REMEDIES

    judged = {"rewards": [{"function": "reward_model"}], "reward_model": {"path": "m"}}
    model = {"config": {"model_type": "a"}, "tokenizer": "t"}
    ppo = {"critic": {}, "algorithm": {"advantage": "gae"}}
    known = values(model=model, environment={"path": "e.py:E"}, **judged, **ppo)
    for key in (*CARRIED_OUT, *REMEDIES, *NOT_FREE, *IDENTITY):
        node = known
        for part in key.split("."):
            if isinstance(node, list):
                node = node[0]
                continue
            if part == "options":
                break
            assert part in node, key
            node = node[part]

"""Reading a configuration: what is written is what is used, and every mistake is shown with its place."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from anytron.base.errors import ConfigError
from anytron.config.anchor import anchor
from anytron.config.dump import to_yaml
from anytron.config.load import load_config
from anytron.config.options import known_keys
from anytron.config.schema import RunConfig
from anytron.config.scoring import RewardSection
from tests.core.config.conftest import GOOD, refusal


def test_values_are_those_of_the_file_and_defaults_elsewhere(good):
    config = load_config(good)

    assert config.trainer.total_steps == 10
    assert config.optimizer.lr == 1e-4  # YAML 1.1 would read the text '1e-4'
    assert [reward.weight for reward in config.rewards] == [1.0, 0.5]
    assert config.rollout == RunConfig.model_fields["rollout"].default


@pytest.mark.parametrize(
    "override", ["algorithm.entropy_coefficient=.nan", "optimizer.lr=.inf", "rewards[0].weight=.inf"]
)
def test_numbers_are_finite(good, override):
    assert "finite number" in refusal(good, override).why


def test_overrides_are_yaml_reach_into_lists_and_the_last_wins(good):
    config = load_config(
        good,
        ["trainer.total_steps=5", "trainer.total_steps=7", "rewards[1].weight=2", "rollout.stop=[a, 'b=c']",
         "engine.options={transformer: {x: {y: 1}}}", "engine.distributed_optimizer=false", "platform.name=null"],
    )  # fmt: skip

    assert config.trainer.total_steps == 7
    assert config.rewards[1].weight == 2.0
    assert config.rollout.stop == ["a", "b=c"]
    assert config.engine.options == {"transformer": {"x": {"y": 1}}}
    assert config.engine.distributed_optimizer is False
    assert config.platform.name is None


def test_an_override_replaces_a_mapping_and_does_not_mix_with_it(good):
    assert load_config(good, ["model.config={model_type: llama}"]).model.config == {"model_type": "llama"}


def test_keys_can_refer_to_others_overridden_ones_too(write):
    path = write(GOOD + "  output_dir: runs/seed-${trainer.seed}\n")

    assert load_config(path, ["trainer.seed=8"]).trainer.output_dir == "runs/seed-8"


@example(steps=1, lr=1.0, text="0E0")  # a float to OmegaConf, and to PyYAML a string
@example(
    steps=1, lr=1.0, text=r"\${oc.env:HOME} \\${seed}"
)  # no reference: it was resolved before, or came from nobody
@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-12, 1e3),
    text=st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=20),
)
def test_what_is_dumped_is_read_back(tmp_path_factory, steps, lr, text):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    values = yaml.safe_load(GOOD) | {
        "trainer": {"total_steps": steps},
        "optimizer": {"lr": lr},
        "data": {"source": text},
    }
    config = RunConfig.model_validate(values)
    path.write_text(to_yaml(config), encoding="utf-8")

    assert load_config(path) == anchor(config, path.parent)


def test_an_unknown_key_is_refused_with_file_line_and_the_nearest_known_name(good):
    good.write_text(GOOD.replace("total_steps", "total_stesp"))

    error = refusal(good)

    assert error.where == f"trainer.total_stesp ({good}:14)"
    assert error.why == "unknown key 'total_stesp' in trainer"
    assert error.fix == "did you mean trainer.total_steps?"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("rewards[0].wieght=2", "did you mean rewards.0.weight?"),
        ("paralel.tensor_model_parallel_size=2", "did you mean parallel?"),
        ("parallel.tensor_parallel_size=2", "did you mean parallel.tensor_model_parallel_size?"),
        ("tracking.xyz=2", "known keys: progress, plot, sinks, close_timeout_s"),
    ],
)
def test_a_mistake_on_the_command_line_says_so(good, override, fix):
    error = refusal(good, override)

    assert f"(command line: {override})" in error.where
    assert error.fix == fix


def test_all_mistakes_come_at_once(good):
    text = str(refusal(good, "trainer.seed=abc", "rollout.temperature=-1", "data.sauce=1", "model.path=here"))

    assert "The configuration has 4 mistakes." in text
    assert "trainer.seed (command line: trainer.seed=abc)" in text
    assert "the value is 'abc'" in text
    assert "greater than 0; the value is -1" in text
    assert "did you mean data.source?" in text
    assert "give exactly one of model.path and model.config" in text


@pytest.mark.parametrize(
    ("override", "says"),
    [("algorithm.advantage=gae", "needs a critic"), ("critic={}", "critic needs algorithm.advantage=gae")],
)
def test_a_critic_stands_where_it_is_used(good, override, says):
    with pytest.raises(ConfigError, match=says):
        load_config(good, [override])
    config = load_config(good, ["algorithm.advantage=gae", "critic={warmup_steps: 3}"])
    assert config.policy_steps == config.trainer.total_steps - 3


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm.distillation_coefficient=1"], "distillation_coefficient needs a teacher"),
        (["teacher={path: t}"], "teacher has no effect with algorithm.distillation_coefficient=0"),
        (["algorithm.advantage=none"], "with algorithm.advantage=none rewards have no effect"),
    ],
)
def test_a_teacher_stands_where_it_is_used(good, overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_config(good, overrides)


def test_rewards_may_be_missing_where_they_teach_nothing(good):
    taught = ["teacher={path: t}", "algorithm.distillation_coefficient=1"]
    with pytest.raises(ConfigError, match="rewards is required"):
        load_config(good, ["rewards=[]", *taught])
    alone = ["rewards=[]", *taught, "algorithm.advantage=none"]
    assert load_config(good, alone).rewards == []
    with pytest.raises(ConfigError, match=r"validation\.sets\.0 has no rewards"):
        load_config(good, [*alone, "validation={sets: [{name: a, data: {source: jsonl}}]}"])


def test_a_teacher_alone_beside_rewards_or_for_an_estimator_of_one_s_own(good):
    taught = ["teacher={path: t}", "algorithm.distillation_coefficient=0.5"]
    assert load_config(good, taught).algorithm.advantage == "grpo"
    assert load_config(good, [*taught, "algorithm.advantage=none"]).teacher is not None
    own = ["teacher={path: t}", "algorithm.advantage=mine.py:estimate"]
    assert load_config(good, own).algorithm.distillation_coefficient == 0.0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rewards=[{function: reward_model}]"], "add a section reward_model"),
        (["reward_model={path: m}"], "the section reward_model is not used"),
        (
            ["reward_model={path: m}", "rewards=[{function: reward_model, processes: 2}]"],
            "processes applies to reward functions only",
        ),
        (
            ["reward_model={path: m}", "rewards=[{function: reward_model, options: {a: 1}}]"],
            "options applies to reward functions only",
        ),
    ],
)
def test_a_reward_model_stands_where_it_is_asked(good, overrides, says):
    with pytest.raises(ConfigError, match=says):
        load_config(good, overrides)


def test_ranks_of_a_reward_model_have_its_sizes_and_none_of_the_other_models(good):
    sizes = "{tensor_model_parallel_size: 2, data_parallel_size: 3}"
    judged = [
        f"reward_model={{path: m, parallel: {sizes}, max_tokens_per_micro_batch: 99}}",
        "rewards=[{function: reward_model, weight: 0.5, on_error: zero}]",
        "algorithm={advantage: gae, distillation_coefficient: 1, kl_coefficient: 0.1}",
        "critic={}",
        "teacher={path: t}",
        "engine.offload=[teacher]",
    ]
    config = load_config(good, judged)
    own = RunConfig.model_validate(config.of_reward_model.model_dump(mode="json"))  # as a worker gets it
    assert (own.model.path, own.model.dtype) == (config.reward_model.path, config.model.dtype)
    assert (config.parallel.world_size, own.parallel.world_size) == (1, 6)
    assert own.engine.max_tokens_per_micro_batch == 99
    assert (own.critic, own.teacher, own.engine.offload, own.algorithm.kl_coefficient) == (None, None, [], 0.0)


@pytest.mark.parametrize(
    ("key", "now"),
    [
        ("engine.router_replay", "engine.options.router_replay"),
        ("engine.mtp_loss_coefficient", "engine.options.mtp_loss_coefficient"),
        ("engine.mtp_detach", "engine.options.mtp_detach"),
        ("parallel.virtual_pipeline_model_parallel_size", "engine.options.virtual_pipeline_model_parallel_size"),
    ],
)
def test_a_key_that_has_become_an_option_of_an_engine_is_refused_with_its_new_name(good, key, now):
    error = refusal(good, f"{key}=2")

    assert error.where == f"{key} (command line: {key}=2)"
    assert error.fix == f"write {now}"


def test_a_field_of_the_transformer_config_is_refused_with_its_new_name(good):
    error = refusal(good, "engine.options.hidden_dropout=0.1")

    assert error.where.startswith("engine.options.hidden_dropout (command line")
    assert error.fix == "write engine.options.transformer.hidden_dropout"


def test_an_unknown_option_is_refused_with_file_line_and_the_nearest_known_name(good):
    good.write_text(GOOD + "engine:\n  options:\n    router_repaly: old-log-probs\nrollout:\n  options: {device: 0}\n")

    text = str(refusal(good))

    assert f"engine.options.router_repaly ({good}:17): unknown key 'router_repaly' in engine.options" in text
    assert "did you mean engine.options.router_replay?" in text
    assert f"rollout.options.device ({good}:19)" in text
    assert "did you mean rollout.options.device_map?" in text


def test_a_wrong_value_of_an_option_is_refused_like_any_other(good):
    assert refusal(good, "rollout.options.device_map=auto").why == "Input should be 'balanced'; the value is 'auto'"
    assert "greater than or equal to 0" in refusal(good, "engine.options.mtp_loss_coefficient=-1").why


def test_options_of_an_engine_that_is_not_installed_are_not_judged(good):
    """That there is no such engine is found when the machine is checked."""
    assert load_config(good, ["engine.name=other", "engine.options.any=1"]).engine.options == {"any": 1}


def test_missing_sections_are_named(write):
    assert "data" in str(refusal(write("model: {path: x}\nrewards: [{function: f}]\n")))


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("a: 1\nb: [\nc: 3", "run.yaml:", "expected"),
        ("a: 1\na: 2\n", "run.yaml:2:", "duplicate key a"),
        ("- a\n", "run.yaml", "its top level is a list"),
        ("trainer: 'x", "run.yaml:", "end of stream"),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_line(write, text, where, why):
    error = refusal(write(text))

    assert where in error.where
    assert why in error.why


def test_a_missing_file_is_refused_with_the_nearest_one(good):
    error = refusal(good.with_name("rnu.yaml"))

    assert "There is no configuration file" in error.what
    assert str(good) in error.fix


@pytest.mark.parametrize("override", ["trainer.seed", "=3", "trainer.seed=[", "rewards[7].weight=2"])
def test_an_override_that_makes_no_sense_is_refused(good, override):
    assert refusal(good, override).where == "command line"


def test_references_of_every_kind_are_resolved(write, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("STEPS", "7")
    text = (
        GOOD.replace("total_steps: 10", "total_steps: ${oc.decode:${oc.env:STEPS}}") + "rollout: {max_new_tokens: 3}\n"
    )
    config = load_config(
        write(text),
        ["trainer.output_dir=${oc.env:SCRATCH}/${.seed}", "rollout.samples_per_prompt=${trainer[seed]}",
         "rewards[1].function=${rewards[0].function}", "data.options={a: '${..source}', b: '${oc.env:NONE,plain}'}",
         "algorithm.epochs=${trainer.${data.options.c}}", "data.options.c=seed"],
    )  # fmt: skip
    assert (config.trainer.total_steps, config.trainer.output_dir) == (7, "/scratch/3")
    assert (config.rollout.samples_per_prompt, config.algorithm.epochs) == (3, 3)
    assert config.rewards[1].function == "first"
    assert config.data.options == {"a": "task:prompts", "b": "plain", "c": "seed"}


def test_an_escaped_reference_is_text(good):
    overrides = ["data.options={system: '\\${oc.env:HOME}', loop: '\\${data.options.loop}'}"]
    assert load_config(good, overrides).data.options == {"system": "${oc.env:HOME}", "loop": "${data.options.loop}"}


@pytest.mark.parametrize(
    "override",
    [
        "rewards[0].name=${oc.env:MYTOKEN}",
        "rewards[0].name='\\\\${oc.env:MYTOKEN}'",
        "rewards[0].name=x-${oc.env:MYTOKEN}-y",
        "rewards[0].name=${rewards[1].options.key}",
        "rewards[0].name=${rewards[1].options.${rewards[1].options.which}}",
        "rewards[0].name=${oc.decode:${oc.env:MYTOKEN}}",
        "rewards[0].name=${oc.env:NONE,${oc.env:MYTOKEN}}",
        "rewards[0].name=${oc.select:rewards.1.options.key}",
        "rewards[0].name=${oc.env:${rewards[1].options.variable}}",
        "validation={sets: [{name: '${oc.env:MYTOKEN}', data: {source: jsonl}}]}",
        "data.mix=[{source: jsonl, name: '${oc.env:MYTOKEN}'}]",
        "data.options.system=${oc.env:MYTOKEN}",
        "model.config={model_type: qwen3, note: '${oc.env:MYTOKEN}'}",
        "model.config=${rewards[1].options}",
    ],
)
def test_no_value_of_the_environment_reaches_what_others_can_read(good, monkeypatch, override):
    monkeypatch.setenv("MYTOKEN", "hunter2secret")
    options = "rewards[1].options={key: '${oc.env:MYTOKEN}', which: key, variable: MYTOKEN, small: 3}"
    assert load_config(good, [options]).rewards[1].options["key"] == "hunter2secret"
    error = refusal(good, options, override)
    assert "environment variable" in error.why
    assert "hunter2secret" not in str(error)
    assert override.partition("=")[0].replace("[0]", ".0") in str(error)


def test_a_reference_to_nothing_is_refused_where_it_stands(good):
    error = refusal(good, "trainer.seed=${trainer.sede}")

    assert "trainer.seed cannot be resolved" in error.what
    assert "trainer.sede" in error.why
    assert "command line" in error.where


def test_known_keys_walk_through_sections_and_lists():
    assert "total_steps" in known_keys(RunConfig, ["trainer"])
    assert known_keys(RunConfig, ["rewards", "0"]) == list(RewardSection.model_fields)
    assert known_keys(RunConfig, []) == list(RunConfig.model_fields)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.kl_target=0.1", "kl_target needs algorithm.kl_coefficient above 0"),
        ("algorithm.kl_placement=reward", "kl_placement=reward needs algorithm.kl_coefficient above 0"),
        ("algorithm.importance_floor=3", "every token would be masked"),
        ("algorithm.dual_clip=1", "greater than 1"),
    ],
)
def test_settings_of_an_algorithm_that_do_nothing_are_refused(good, override, says):
    assert says in str(refusal(good, override))

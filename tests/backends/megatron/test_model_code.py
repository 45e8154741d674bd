"""Python files of a model directory never run: not asked for, not by answering "y" at a terminal, not in a worker."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.config.imports import resolve
from anytron.task.data.pretrained import TOKENIZER
from anytron_conformance.tiny_models import CONFIGS, write_tiny_model

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = ("code", "modeling_kimi_k25", "configuration_kimi_k25", "custom_generate/generate")

LOADING = """
import sys
from pathlib import Path
from anytron.config.schema import ModelSection
from anytron.task.data import pretrained
for directory in sys.argv[1:]:
    model = ModelSection(path=directory)
    for load in (pretrained.load_hf_config, pretrained.load_tokenizer, pretrained.load_image_processor):
        try:
            loaded = load(model)
        except Exception as error:
            print(Path(directory).name, load.__name__, type(error).__name__)
        else:
            print(Path(directory).name, load.__name__, type(loaded).__module__.partition(".")[0])
            if load is pretrained.load_hf_config:
                pretrained.model_class(loaded).from_config(loaded)
"""
"""What the driver and the rollout worker load of a model directory."""

IN_A_WORKER = """
import sys
from anytron.base.errors import EngineError
from anytron.device.stack import open_device_stack
from anytron.device.patches import Phase
layer = open_device_stack("cpu", engine="megatron")
layer.apply_phase(Phase.BEFORE_PARALLEL_INIT)
from mcore_bridge.model.mm_gpts import internvl, kimi_vl, llava, qwen
from mcore_bridge.model.mm_gpts.utils import patch_get_dynamic_module
from transformers import AutoConfig, AutoTokenizer, GenerationMixin
with patch_get_dynamic_module():  # as mcore-bridge calls it
    for call in (
        *(lambda one=one: one.get_class_from_dynamic_module("modeling_kimi_k25.A", sys.argv[1])
          for one in (internvl, kimi_vl, llava, qwen)),
        lambda: AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True),
        lambda: GenerationMixin().load_custom_generate(sys.argv[1], trust_remote_code=True),
    ):
        try:
            call()
        except EngineError as error:
            print(error.what)
"""


@pytest.fixture
def witness(tmp_path):
    """A file that exists once any of a directory's Python files has run."""
    return tmp_path / "witness"


@pytest.fixture
def directory(tmp_path, witness):
    """Make a model directory full of code, of a model type of one's choice, that would train otherwise."""

    def make(model_type):
        folder = write_tiny_model("qwen3", tmp_path / model_type)
        resolve(f"{EXAMPLES}/sort_digits.py:tokenizer", TOKENIZER)().save_pretrained(folder)
        classes = {f"Auto{kind}": "code.A" for kind in ("Config", "ModelForCausalLM", "ImageProcessor", "Processor")}
        classes["AutoTokenizer"] = ["code.A", "code.A"]
        config = {**CONFIGS["qwen3"], "model_type": model_type, "auto_map": classes}
        processor = {"image_processor_type": "A", "auto_map": classes}
        for name, content in {
            "config": config,
            "preprocessor_config": processor,
            "processor_config": processor,
        }.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        tokenizer |= {"tokenizer_class": "A", "auto_map": classes}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / f"{name}.py").write_text(f"open({str(witness)!r}, 'a').write(__name__)\nclass A: pass\n")
        return folder

    return make


def at_a_terminal(*command):
    """Run a command whose user answers every question with yes; return its exit status and what it said."""
    controller, terminal = pty.openpty()
    os.write(controller, b"y\n" * 20)
    environment = {**os.environ, "HF_MODULES_CACHE": command[-1] + "-modules"}
    try:
        done = subprocess.run(
            [sys.executable, *command], stdin=terminal, capture_output=True, text=True, timeout=200, check=False,
            env=environment,
        )  # fmt: skip
    finally:
        os.close(controller)
        os.close(terminal)
    return done.returncode, done.stdout + done.stderr


def test_nothing_that_is_loaded_of_a_directory_runs_its_code(directory, witness):
    known, unknown = directory("qwen3"), directory("unheard_of")
    status, said = at_a_terminal("-c", LOADING, str(known), str(unknown))
    assert status == 0, said
    assert not witness.exists(), said
    assert "Do you wish to run" not in said
    assert "qwen3 load_hf_config transformers" in said
    assert "unheard_of load_hf_config ConfigError" in said
    for model_type in ("qwen3", "unheard_of"):
        assert f"{model_type} load_tokenizer " in said
        assert f"{model_type} load_image_processor ConfigError" in said


def test_a_run_refuses_a_model_that_is_built_of_its_directorys_code(directory, witness, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {directory('kimi_k25')}}}\n"
        f"data: {{source: {EXAMPLES}/sort_digits.py:prompts, options: {{count: 4, digits: 4}}}}\n"
        f"rewards: [{{function: {EXAMPLES}/sort_digits.py:reward}}]\n"
    )
    status, said = at_a_terminal("-m", "anytron", "train", str(tmp_path / "run.yaml"))
    assert status == 1
    assert "Anytron runs no code of a model directory" in said
    assert "Traceback" not in said
    assert not witness.exists()


def test_a_training_rank_refuses_it_whoever_asks(directory, witness):
    status, said = at_a_terminal("-W", "ignore", "-c", IN_A_WORKER, str(directory("qwen3")))
    assert status == 0, said
    assert said.count("A model directory wants to run its own code.") == 6, said
    assert not witness.exists()


def test_a_configuration_cannot_ask_for_it(tmp_path):
    from anytron.config.schema import ModelSection

    with pytest.raises(ValueError, match="trust_remote_code"):
        ModelSection.model_validate({"path": "m", "trust_remote_code": True})

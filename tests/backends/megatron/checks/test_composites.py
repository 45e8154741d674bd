"""Models of which only the language model is read are refused where that is not possible, in words that say why."""

import json

import pytest

from anytron.task.data.composites import COMPOSITES
from anytron.task.data.model_files import as_known
from anytron_megatron.checks.model import model_diagnostics
from anytron_megatron.checks.subject import Subject
from anytron_megatron.options import MegatronOptions
from tests.backends.megatron.checks.test_model import refusal, remarks
from tests.backends.megatron.families.published import PUBLISHED


@pytest.mark.parametrize("family", COMPOSITES)
def test_a_whole_model_in_a_config_of_ones_own_gets_the_part_that_is_read(family):
    whole = next(model for model in PUBLISHED.values() if model["model_type"] == family)
    field = COMPOSITES[family].field
    refused = refusal(whole)
    assert refused.key == "model.config"
    assert f"it reads the language model ({field}) alone" in refused.message
    assert refused.fix == f"set model.path to its directory, or model.config to the fields of its {field}"
    assert remarks(as_known(whole)) == []


def test_the_bridge_still_registers_llava_by_another_name_than_it_reads():
    from importlib.util import find_spec
    from pathlib import Path

    (root,) = find_spec("mcore_bridge").submodule_search_locations
    assert "['llava_onevision1_5']" in (Path(root) / "model/mm_gpts/llava.py").read_text()
    parser = (Path(root) / "config/parser.py").read_text()
    assert "'llavaonevision1_5'" in parser
    assert "'llava_onevision1_5'" not in parser


@pytest.mark.parametrize("text", [{"model_type": "internlm2"}, {"vocab_size": 9}, None])
def test_a_language_model_that_no_test_compares_is_refused(text, tmp_path):
    fields = {**PUBLISHED["internvl_chat"], "llm_config": text}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    subject = Subject._in_directory("model.path", str(tmp_path))
    (refused,) = model_diagnostics(subject, MegatronOptions())
    assert refused.severity == "error"
    found = (text or {}).get("model_type")
    assert refused.message.endswith(f"and this one is {found}, not one of qwen2, qwen3, qwen3_moe")

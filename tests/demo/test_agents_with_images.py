"""A whole run of agents that send pictures and branch: rollout and training read the same in each conversation."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from tests.house import ROOT

TASK = f"""
import base64, io, random, sys

import httpx

sys.path.insert(0, {str(ROOT / "examples")!r})
import count_shapes
from anytron.tasks import Prompt

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = '''{{%- for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}
{{%- for part in m.content %}}{{{{ "PLACE" if part.type == 'image' else part.text }}}}{{% endfor %}}{{% endif %}}
{{%- if m.role == 'assistant' %}}{{{{ '<eos>' }}}}{{% endif %}}{{% endfor %}}
{{{{- '?' if add_generation_prompt }}}}'''.replace("PLACE", PLACE)
HTTP = httpx.Client(timeout=60, trust_env=False)


def tokenizer():
    one = count_shapes.tokenizer()
    one.chat_template = TEMPLATE
    return one


def prompts(count):
    for place, prompt in enumerate(count_shapes.prompts(count)):
        yield Prompt(str(place), text="?", data=prompt.data)


def shown(generator):
    file = io.BytesIO()
    count_shapes.picture(generator.randint(1, 6), generator).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {{"role": "user", "content": [{{"type": "image_url", "image_url": {{"url": url}}}}]}}


def solve(task):
    generator, messages, said = random.Random(task.prompt_id), [], 0
    for count in (1, 2):
        messages.append(shown(generator))
        answer = HTTP.post(
            task.base_url + "/chat/completions",
            json={{"model": task.model, "messages": messages, "n": count}},
            headers={{"Authorization": "Bearer " + task.api_key}},
        )
        if answer.is_error and answer.json()["error"]["code"] == "image_token_written":
            break
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
        said += task.data["answer"] in messages[-1]["content"]
    return float(said)
"""


@pytest.mark.slow
def test_rollout_and_training_agree_on_every_token(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    config = yaml.safe_load((ROOT / "examples" / "grpo_count_shapes.yaml").read_text())
    config["model"] |= {
        "tokenizer": "task.py:tokenizer",
        "processor": str(ROOT / "examples/count_shapes.py:image_processor"),
    }
    config |= {
        "data": {"source": "task.py:prompts", "options": {"count": 100}, "prompts_per_step": 4},
        "environment": {"agent": "task.py:solve", "max_turns": 3, "processes": 2},
        "rewards": [{"function": "environment"}],
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 2},
        "trainer": {
            "total_steps": 2, "output_dir": str(tmp_path / "run"), "log_samples": 16,
            "rollout_log_prob_tolerance": 1e-4,
        },
        "tracking": {"plot": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "anytron", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps, samples = (
        [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    assert {step["environment/failed"] for step in steps} == {0}
    assert max(step["rollout/log_prob_abs_diff"] for step in steps) < 1e-4
    branched = [sample for sample in samples if "others" in sample]
    assert branched
    for sample in branched:
        (other,) = sample["others"]
        given = sample["response_mask"].index(0)
        assert not any(other["response_mask"][:given])
        assert sample["response_tokens"].count(13) > 1  # the second picture

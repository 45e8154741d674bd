"""What could run code, or listen to everybody, stands in few places, each with its reason (SECURITY.md)."""

from __future__ import annotations

import ast

import pytest

from tests.house import ROOT

FOLDERS = ("core", "backends", "plugins/accelerator", "plugins/cpu", "plugins/cuda", "plugins/ascend/anytron_ascend")
FOLDERS += ("plugins/ascend/simulator", "plugins/verl/anytron_verl", "examples", "benchmarks")
NAMES = {"torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "yaml.load"}
NAMES |= {"yaml.unsafe_load", "os.system", "os.popen", "eval", "exec"}
KEYWORDS = {"trust_remote_code", "shell", "allow_pickle"}
"""Arguments that must not be True."""
EVERYBODY = "0.0.0.0"

ALLOWED = {
    (
        "core/anytron/workers/executor/channel.py",
        "pickle.loads",
    ): "between processes of one run, over unnamed socket pairs",
    (
        "core/anytron/task/isolation/worker.py",
        "pickle.loads",
    ): "what the driver sends, over an unnamed socket pair; answers are JSON",
    (
        "core/anytron/task/isolation/reader.py",
        "pickle.loads",
    ): "what the driver asks its own fork; nothing comes back so",
    ("backends/anytron_megatron/checkpoint/unpickling.py", "pickle.Unpickler"): "with a list of classes, of all others",
    ("backends/anytron_megatron/checkpoint/unpickling.py", "torch.load"): "with weights_only=True",
    ("backends/anytron_megatron/redirect/tensors.py", "torch.load"): "replaced by one that translates map_location",
    (
        "core/anytron/task/data/pretrained.py",
        "from_pretrained",
    ): "with trust_remote_code=False and local_files_only=True",
    ("examples/smollm2.py", "from_pretrained"): "of a GGUF file whose checksum is known, with local_files_only=True",
    ("benchmarks/learning.py", "from_pretrained"): "of what its own runs have written, with local_files_only=True",
    (
        "core/anytron/proof/verification/hugging_face.py",
        "from_pretrained",
    ): "of a class of transformers itself, with local_files_only=True",
}


def found(path, text=None):
    """Dangerous names, arguments and addresses in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if text is None else text)):
        name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name in NAMES or name.rpartition(".")[2] == "from_pretrained":
            yield name if name in NAMES else "from_pretrained"
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{node.arg}={ast.unparse(node.value)}"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in KEYWORDS and ast.unparse(value) != "False":
                    yield f"{key.value}={ast.unparse(value)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and EVERYBODY in node.value:
            yield EVERYBODY


def test_they_stand_where_the_list_says_and_nowhere_else():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    everywhere = {(str(path.relative_to(ROOT)), what) for path in files for what in found(path)}
    assert everywhere == set(ALLOWED)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import torch\ntorch.load(f, weights_only=True)", "torch.load"),
        ("pickle.loads(x)", "pickle.loads"),
        ("class U(pickle.Unpickler): ...", "pickle.Unpickler"),
        ("yaml.load(x, yaml.SafeLoader)", "yaml.load"),
        ("eval('1')", "eval"),
        ("AutoModel.from_pretrained(x)", "from_pretrained"),
        ("f(trust_remote_code=True)", "trust_remote_code=True"),
        ("f(**{'trust_remote_code': trust})", "trust_remote_code=trust"),
        ("subprocess.run(x, shell=True)", "shell=True"),
        ("listen('tcp://0.0.0.0:1')", EVERYBODY),
    ],
)
def test_each_would_be_noticed(text, what):
    assert list(found(None, text)) == [what]
    assert list(found(None, "model.eval(); f(trust_remote_code=False, shell=False); evaluate(1)")) == []

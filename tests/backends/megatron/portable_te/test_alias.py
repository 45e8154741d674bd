"""The name ``transformer_engine``: same modules, honest to those who look, and gone after undo."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

INSTALL = """
from anytron.device.loading import hooks_of
from anytron_megatron.portable_te.alias import install
undo = install(hooks_of(), "cpu")
"""


def run(program: str, *, cwd=None) -> str:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_both_names_give_the_same_module_objects():
    run(
        INSTALL
        + """
import importlib, sys
import transformer_engine as te
import transformer_engine.pytorch.module.base
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.optimizers import FusedAdam
from anytron_megatron import portable_te
assert te is portable_te and te.__version__.startswith("2.8.0+")
aliases = [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
assert len(aliases) > 15
for name in aliases:
    own = "anytron_megatron.portable_te" + name.removeprefix("transformer_engine")
    assert sys.modules[name] is importlib.import_module(own), name
assert te.pytorch.Linear is portable_te.pytorch.module.linear.Linear
"""
    )


def test_specifications_are_found_and_there_is_no_distribution():
    run(
        INSTALL
        + """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("transformer_engine").origin.endswith("portable_te/__init__.py")
assert importlib.util.find_spec("transformer_engine.pytorch") is not None
for name in ("cpp_extensions", "cross_entropy", "cpu_offload", "graph"):
    assert importlib.util.find_spec(f"transformer_engine.pytorch.{name}") is None, name
for name in ("transformer-engine", "transformer_engine"):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    raise AssertionError(name)
"""
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_accelerate_and_transformers_live_beside_it(order):
    imports = "import accelerate, peft, transformers\n"
    run(
        (INSTALL + imports if order == "before" else imports + INSTALL)
        + """
import torch
from accelerate.utils import is_transformer_engine_available
assert not is_transformer_engine_available()
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM
config = Qwen3Config(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8)
model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
"""
    )


def test_undo_takes_the_names_away_and_forgets_the_hooks():
    run(
        INSTALL
        + """
import importlib.util, sys
from anytron.base.errors import EngineError
from anytron_megatron.portable_te.binding import kernels
kernels()
undo()
assert not [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
assert importlib.util.find_spec("transformer_engine") is None
try:
    kernels()
except EngineError:
    pass
else:
    raise AssertionError("still bound")
"""
    )


def make_real_one(folder):
    """Transformer Engine as pip installs it: the package and its distribution's metadata."""
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.9.0'\n")
    (folder / "transformer_engine_torch.py").touch()
    info = folder / "transformer_engine-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.9.0\n")


def test_an_installed_transformer_engine_is_passed_over_with_a_warning(tmp_path):
    make_real_one(tmp_path)
    output = run(
        INSTALL
        + """
import transformer_engine
from anytron_megatron.patches.triton_stand_in import CONCERNED, stand_in_during_imports
stand_in_during_imports(CONCERNED)
from megatron.core import utils
print(transformer_engine.__version__, utils.tex, utils.get_te_version())
undo()
import transformer_engine_torch
""",
        cwd=tmp_path,
    )
    assert "2.8.0+anytron None 2.8.0+anytron" in output
    assert "is not used" in output
    assert str(tmp_path) in output


def test_the_cpu_platform_takes_the_name_of_an_installed_one_and_says_so(tmp_path):
    make_real_one(tmp_path)
    output = run(
        """
        import importlib.metadata
        from anytron.device.hooks.types import PatchContext
        from anytron.device.patches import Ledger, Phase
        from anytron.device.loading import open_session
        assert importlib.metadata.version("transformer-engine") == "2.9.0"
        session = open_session(platform="cpu")
        context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
        Ledger(context=context).apply(Phase.BEFORE_IMPORT, session.hooks.patch_model(Phase.BEFORE_IMPORT, context))
        import transformer_engine.pytorch
        print(transformer_engine.__version__)
        # accelerate finds the real one's metadata, asks what it can do, and is told.
        from accelerate.utils import is_transformer_engine_available, is_transformer_engine_mxfp8_available
        print(is_transformer_engine_available(), is_transformer_engine_mxfp8_available())
        """,
        cwd=tmp_path,
    )
    assert "2.8.0+anytron\nTrue False\n" in output
    assert f"transformer_engine at {tmp_path}" in output
    assert "is not used" in output


def test_batch_invariant_mode_is_refused_before_it_replaces_an_operator():
    run(
        """
        import torch
        from anytron.base.errors import EngineError
        from anytron.device.hooks.types import OWN_TRAINER, PatchContext
        from anytron.device.loading import open_session
        from anytron.device.patches import Ledger, Phase
        session = open_session(platform="cpu")
        context = PatchContext(session.platform, "trainer", session.hooks, OWN_TRAINER)
        ledger = Ledger(context=context)
        for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
            ledger.apply(phase, session.hooks.patch_model(phase, context))
        from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels
        for enable in (kernels.enable_batch_invariant_mode, kernels.set_batch_invariant_mode(True).__enter__):
            try:
                enable()
            except EngineError as error:
                assert "remove --batch-invariant-mode" in str(error), error
            else:
                raise AssertionError("enabled")
        assert not kernels.is_batch_invariant_mode_enabled()
        torch.ones(2, 2) @ torch.ones(2, 2)
        """
    )


def test_one_that_was_imported_already_is_an_error(tmp_path):
    make_real_one(tmp_path)
    output = run(
        f"""
        import transformer_engine
        try:
            {textwrap.indent(INSTALL.strip(), " " * 12).strip()}
        except Exception as error:
            print(type(error).__name__, error)
        """,
        cwd=tmp_path,
    )
    assert "PatchError" in output
    assert str(tmp_path) in output
    assert "already imported" in output


def test_importing_the_package_takes_no_name():
    run(
        """
        import sys
        import anytron_megatron.portable_te
        assert "transformer_engine" not in sys.modules
        assert "megatron.core" not in sys.modules
        """
    )

"""Megatron's patches in a process of their own, with real Megatron and mcore-bridge.

Everything global happens in subprocesses: this process imports neither.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from anytron.device.patches.plan import in_range, installed_version

pytestmark = [
    pytest.mark.mcore,
    pytest.mark.skipif(not installed_version("mcore-bridge"), reason="mcore-bridge needs megatron-core 0.16 or later"),
]

PRELUDE = """
import json, logging, sys, warnings
# Strict about Megatron and about us; what torch and transformers say about themselves is theirs.
warnings.filterwarnings("error", module=r"(megatron|mcore_bridge|anytron|__main__)")
from types import SimpleNamespace
import torch
torch.set_num_threads(1)
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron.device.runtime import DeviceRuntime, MemoryStats
from anytron_megatron.patches import trainer_patches

class Host(DeviceRuntime):
    device_type, communication_backend = "cpu", "gloo"
    def device_count(self): return 1
    def current_device(self): return torch.device("cpu")
    def set_device(self, index): pass
    def synchronize(self): pass
    def empty_cache(self): pass
    def memory_stats(self): return MemoryStats(0, 0, 0, 1)
    def manual_seed(self, seed): torch.manual_seed(seed)
    def get_rng_state(self): return torch.get_rng_state()
    def set_rng_state(self, state): torch.set_rng_state(state)
    def default_generator(self): return torch.default_generator

host = Host()
platform = SimpleNamespace(runtime=lambda: host, redirects_torch_cuda=True, portable_modules=True)
context = SimpleNamespace(platform=platform, role="trainer", kernels=hooks_of(), engine="megatron")
ledger = Ledger(context=context)

def apply(*phases):
    for phase in phases:
        ledger.apply(phase, trainer_patches(phase, context))

def answer(value):
    print("ANSWER " + json.dumps(value))
"""


def run(body, expect=0):
    """Run ``body`` after the prelude, warnings being errors; return what it answered, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return (json.loads(answers[-1]) if answers else None), done.stderr


@pytest.fixture(scope="module")
def story():
    """One process that applies everything, looks around, and undoes it."""
    result, _ = run("""
        from importlib.util import find_spec
        originals = torch.compile, torch.cuda.Stream, torch.zeros
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        filters = list(warnings.filters)
        apply(*Phase)
        large = ("datasets", "datasets.utils.filelock", "modelscope", "pandas", "pyarrow")
        imported = [name for name in large if name in sys.modules]
        from mcore_bridge.utils import torch_utils
        lock, directory = torch_utils.FileLock.__module__, torch_utils.get_cache_dir()

        from megatron.core import jit
        from megatron.core.tensor_parallel import random as megatron_random
        from mcore_bridge.model.modules.kernels import qsa_block_sparse_attn, qsa_kernels
        from transformers import modeling_rope_utils
        from mcore_bridge.model import rope

        def function(): pass
        try:
            qsa_block_sparse_attn._qsa_bs_fwd_kernel[(1,)](1)
            kernel = "ran"
        except Exception as error:
            kernel = str(error)

        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("test", 5)
        before = torch.get_rng_state()
        with tracker.fork("test"):
            first = torch.rand(3, device="cuda")
        unmoved = torch.equal(torch.get_rng_state(), before)
        with tracker.fork("test"):
            second = torch.rand(3, device="cuda")
        torch.manual_seed(5)
        generated = torch.equal(torch.rand(3), first) and torch.equal(torch.rand(3), second)

        entry = modeling_rope_utils.ROPE_INIT_FUNCTIONS.get("default")
        config = SimpleNamespace(rope_scaling=None, rotary_base=10000, kv_channels=8, rotary_percent=1.0,
                                 hidden_size=16, num_attention_heads=2, max_position_embeddings=32,
                                 original_max_position_embeddings=None, qk_pos_emb_head_dim=8,
                                 multi_latent_attention=False, partial_rotary_factor=1.0)
        inverse, _ = rope.get_rope_inv_freq(config)
        kept = modeling_rope_utils.ROPE_INIT_FUNCTIONS.get("default") is entry

        from mcore_bridge.bridge.gpt_bridge import GPTBridge
        bridge = object.__new__(GPTBridge)
        bridge.tp_size, bridge.tp_rank = 2, 1
        def loaded(tensor, dimension):
            return list(bridge._split_tp(tensor, dimension, False, is_embedding=True).shape)
        head = loaded(torch.ones(1, 4), None)
        rows = loaded(torch.ones(5, 4), 0)

        facts = dict(
            head=head, rows=rows, report=ledger.report(),
            jit_is_identity=jit.jit_fuser(function) is function,
            triton_found=find_spec("triton") is not None or "triton" in sys.modules,
            have_triton=qsa_kernels.HAVE_TRITON,
            kernel=kernel, unmoved=unmoved, generated=generated,
            inverse=len(inverse), kept=kept,
            handler_levels=[handler.level for handler in logging.getLogger().handlers],
        )
        ledger.undo()
        facts |= {"imported": imported, "lock": lock, "directory": directory}
        facts["head_as_before"] = loaded(torch.ones(1, 4), None)
        facts["restored"] = (torch.compile, torch.cuda.Stream, torch.zeros) == originals
        facts["cuda_helpers"] = megatron_random._lazy_call is torch.cuda._lazy_call
        new = [str(entry[1]) for entry in warnings.filters if entry not in filters]
        facts["filters_left"] = [message for message in new if "Apex" in message]
        answer(facts)
    """)
    return result


def test_everything_applies(story):
    outcomes = {entry["id"]: entry["outcome"] for entry in story["report"] if entry["outcome"] != "superseded"}
    assert {name for name, outcome in outcomes.items() if outcome == "applied"} >= {
        "megatron.portable-transformer-engine",
        "megatron.torch-cuda",
        "megatron.torch-compile",
        "megatron.import-noise",
        "megatron.triton-imports",
        "megatron.mcore-bridge-import",
        "megatron.mcore-bridge-rope-table",
        "megatron.host-generator-warning",
    }
    assert all(entry["reason"] and entry["remove_when"] for entry in story["report"])


def test_what_the_bridge_changes_at_import_is_recorded(story):
    (detail,) = [entry["detail"] for entry in story["report"] if entry["id"] == "megatron.mcore-bridge-import"]
    for target in (
        "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias",
        "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
        "peft.tuners.lora.model:dispatch_megatron",
    ):
        assert target in detail


def test_the_bridge_takes_its_lock_without_importing_datasets(story):
    assert story["imported"] == []
    assert story["lock"].startswith("filelock")
    assert Path(story["directory"]).is_absolute()  # what modelscope says, which is imported only now


def test_nothing_is_compiled(story):
    assert story["jit_is_identity"]


def test_triton_is_seen_by_nobody_and_its_kernels_refuse(story):
    assert not story["triton_found"]
    assert not story["have_triton"]
    assert "_qsa_bs_fwd_kernel was called, but triton is not installed" in story["kernel"]


def test_megatrons_rng_tracker_forks_the_runtimes_generator(story):
    assert story["unmoved"]
    assert story["generated"]


def test_transformers_rope_table_is_as_before(story):
    assert story["inverse"] == 4
    assert story["kept"]


def test_the_head_of_a_classifier_is_whole_on_each_tensor_parallel_rank_and_a_vocabulary_is_filled_up(story):
    assert story["head"] == [1, 4]
    assert story["rows"] == [3, 4]
    assert story["head_as_before"] == [2, 4], "without the patch it cannot be loaded"


def test_our_log_is_not_silenced_by_the_bridge(story):
    assert story["handler_levels"] == [0]


def test_undo_restores_torch_also_inside_megatron(story):
    assert story["restored"]
    assert story["cuda_helpers"]
    assert story["filters_left"] == []


def test_the_tracker_warns_without_the_filter():
    # The filtered message is real: without the patch every fork that draws says it.
    _, stderr = run("""
        from anytron_megatron.redirect import redirect_torch_cuda
        from anytron_megatron.patches import imports
        from anytron_megatron.patches.triton_stand_in import stand_in_for_triton
        redirect_torch_cuda(host)
        imports.filter_messages(context)
        stand_in_for_triton(context)
        from megatron.core.tensor_parallel import random as megatron_random
        tracker = megatron_random.CudaRNGStatesTracker()
        tracker.add("test", 5)
        with tracker.fork("test"):
            torch.rand(1)
        imports.drop_warning(context)
        with tracker.fork("test"):
            torch.rand(1)
    """)
    assert stderr.count("CPU RNG state changed") == 1


def test_the_redirection_refuses_to_come_after_megatron():
    _, stderr = run(
        """
        warnings.simplefilter("ignore")
        from anytron_megatron.patches.triton_stand_in import stand_in_for_triton
        stand_in_for_triton(context)
        import megatron.core
        apply(Phase.BEFORE_IMPORT)
        """,
        expect=1,
    )
    assert "megatron.core is imported already" in stderr


def test_the_bridge_cannot_be_imported_without_the_stand_in():
    _, stderr = run(
        """
        warnings.simplefilter("ignore")
        for patch in trainer_patches(Phase.BEFORE_IMPORT, context):
            if patch.id != "megatron.triton-imports":
                ledger.add([patch])
        ledger.apply(Phase.BEFORE_IMPORT)
        from anytron_megatron.patches.imports import import_bridge
        import_bridge(context)
        """,
        expect=1,
    )
    assert "No module named 'triton'" in stderr


@pytest.fixture(scope="module")
def latent_attention(run_program, tmp_path_factory):
    return run_program("bridge_mla.py", str(tmp_path_factory.mktemp("deepseek")))


def test_the_bridges_latent_attention_pads_values_itself(latent_attention):
    assert latent_attention["own_forward"]
    assert latent_attention["widths"] == [[12, 12]]  # 6 wide without padding
    assert latent_attention["difference"] < 1e-5


def test_the_patch_of_megatrons_is_recorded_as_superseded_by_that_class(latent_attention):
    rows = {row["target"]: row["outcome"] for row in latent_attention["report"] if row["id"] == "megatron.mla-values"}
    theirs = "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward"
    if in_range(installed_version("megatron-core"), "<0.18,!=0.16.2"):
        assert rows == {theirs: "applied", f"{latent_attention['class']}.forward": "superseded"}
    else:
        assert rows == {theirs: "skipped"}

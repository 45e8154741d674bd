"""What Anytron's code and pages say of vllm-ascend, each as pieces of its source that show it.

A claim names a file and a function or class of vllm-ascend. Its source is parsed and written again without comments,
docstrings and line breaks, so that its formatting does not matter.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BRANCHES = ("v0.23.0", "v0.24.0rc", "v0.25.1rc", "v0.26.0rc", "main")
RELEASES, MAIN = BRANCHES[:-1], BRANCHES[-1:]
OLDEST, BETWEEN = BRANCHES[:1], BRANCHES[1:-1]


@dataclass(frozen=True)
class Claim:
    """Something that is said of vllm-ascend.

    Attributes:
        says: The claim.
        file: File of vllm-ascend.
        place: Qualified name of the function or class; empty = the module.
        present: Pieces of its source, in this order.
        sabotage: A piece of the source, and what to put in its place so that the claim becomes wrong.
        absent: Pieces that its source does not have.
        branches: Where it holds.
    """

    says: str
    file: str
    place: str
    present: tuple[str, ...]
    sabotage: tuple[str, str]
    absent: tuple[str, ...] = ()
    branches: tuple[str, ...] = BRANCHES

    def source(self, checkout: Path) -> str:
        """Read the function's source, in one line."""
        node: ast.AST = ast.parse((checkout / self.file).read_text(encoding="utf-8"))
        for name in filter(None, self.place.split(".")):
            within = [one for one in ast.walk(node) if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
            found = [one for one in within if one.name == name and one is not node]
            assert found, f"{self.file} has no {self.place}"
            node = found[0]
        return one_line(node)

    def missing(self, source: str) -> list[str]:
        """Return the pieces that contradict the claim."""
        start, wrong = 0, []
        for piece in self.present:
            found = source.find(piece, start)
            if found < 0:
                wrong.append(f"not there, or not in this order: {piece}")
            else:
                start = found + len(piece)
        return wrong + [f"there: {piece}" for piece in self.absent if piece in source]


def one_line(node: ast.AST) -> str:
    """Write code in one line, without docstrings."""
    for one in ast.walk(node):
        if isinstance(one, (ast.FunctionDef, ast.ClassDef, ast.Module)) and ast.get_docstring(one) is not None:
            one.body = one.body[1:] or [ast.Pass()]
    return " ".join(ast.unparse(node).split())


CONFIG, UTILS, WORKER = "vllm_ascend/ascend_config.py", "vllm_ascend/utils.py", "vllm_ascend/worker/worker.py"
RUNNER, SAMPLER = "vllm_ascend/worker/model_runner_v1.py", "vllm_ascend/sample/sampler.py"
FUSED_MOE, ROUTED = "vllm_ascend/ops/fused_moe/fused_moe.py", "vllm_ascend/ops/fused_moe/routed_experts.py"
MLA, SFA, MLA_LAYER = "vllm_ascend/attention/mla_v1.py", "vllm_ascend/attention/sfa_v1.py", "vllm_ascend/ops/mla.py"
FUSED_MOE_023 = "vllm_ascend/ops/fused_moe/fused_moe_0_23_0.py"
SHARED = "vllm_ascend/ops/fused_moe/shared_experts.py"
SHARED_CHECK = "_validate_shared_expert_consistency"
VOCABULARY = "vllm_ascend/ops/vocab_parallel_embedding.py"
PROCESS = "process_weights_after_loading"
EXPERTS = f"AscendUnquantizedFusedMoEMethod.{PROCESS}"
TURN = ".transpose(1, 2).contiguous()"
CAST = "torch_npu.npu_format_cast(layer.{}.data, ACL_FORMAT_FRACTAL_NZ)"

LAYOUT = (
    Claim(
        "additional_config.weight_nz_mode sets the layout of weights",
        CONFIG,
        "AscendConfig.__init__",
        ("self.weight_nz_mode = self._get_config_value(", "'weight_nz_mode', 'VLLM_ASCEND_ENABLE_NZ'"),
        ("'weight_nz_mode'", "'nz_mode'"),
    ),
    Claim(
        "a key of additional_config overrides the variable of the environment",
        CONFIG,
        "AscendConfig._get_config_value",
        ("if config_key in additional_config: value = additional_config[config_key]", "return value", "env_key"),
        ("if config_key in additional_config:", "if env_key not in os.environ:"),
    ),
    Claim(
        "the 310P keeps weights in NZ whatever is set; elsewhere mode 0 keeps all of them out, and 1 those in bfloat16",
        UTILS,
        "_should_trans_nz",
        (
            "if is_310p(): return True",
            "config.weight_nz_mode",
            "if not nz_mode: return False",
            "weight.dtype in {torch.bfloat16, torch.float16}: return nz_mode == 2",
        ),
        ("if is_310p(): return True", ""),
    ),
    Claim(
        "weights are cast to NZ only where that says so",
        UTILS,
        "maybe_trans_nz",
        ("if not _should_trans_nz(weight): return weight", "npu_format_cast(weight, ACL_FORMAT_FRACTAL_NZ)"),
        ("if not _should_trans_nz(weight): return weight", ""),
    ),
    Claim(
        "linear layers keep weights as they are loaded, but for NZ",
        "vllm_ascend/ops/linear.py",
        f"AscendUnquantizedLinearMethod.{PROCESS}",
        (f"super().{PROCESS}(layer)", "layer.weight.data = maybe_trans_nz(layer.weight.data)"),
        ("maybe_trans_nz(layer.weight.data)", "maybe_trans_nz(layer.weight.data).transpose(0, 1)"),
        absent=(".transpose(", ".t()", "dispose_"),
    ),
    Claim(
        "a build for the 310P says so in vllm_ascend/_build_info.py",
        "setup.py",
        "gen_build_info",
        ("'vllm_ascend', '_build_info.py'", "__device_type__ = '{device_type}'"),
        ("__device_type__", "__device__"),
    ),
    Claim(
        "a model directory with quant_model_description.json is loaded quantised",
        "vllm_ascend/quantization/utils.py",
        "detect_quantization_method",
        ("get_model_file(model, MODELSLIM_CONFIG_FILENAME", "return ASCEND_QUANTIZATION_METHOD"),
        ("return ASCEND_QUANTIZATION_METHOD", "return None"),
    ),
    Claim(
        "ModelSlim's file has this name",
        "vllm_ascend/quantization/modelslim_config.py",
        "",
        ("MODELSLIM_CONFIG_FILENAME = 'quant_model_description.json'",),
        ("quant_model_description", "quantization"),
    ),
)


def experts(file: str, branches: tuple[str, ...]) -> tuple[Claim, ...]:
    """Claims about the weights of experts, which are in another file on main."""
    turned = tuple(f"self._maybe_pad_weight(layer.{name}.data){TURN}" for name in ("w13_weight", "w2_weight"))
    return (
        Claim(
            "experts are transposed once after loading",
            file,
            EXPERTS,
            turned,
            (turned[1], turned[1] + TURN),
            absent=(TURN + TURN, f".data{TURN}{TURN}"),
            branches=branches,
        ),
        Claim(
            "enable_fused_mc2 keeps experts in NZ without asking for weight_nz_mode",
            file,
            EXPERTS,
            ("if enable_fused_mc2:", CAST.format("w13_weight"), CAST.format("w2_weight"), "else:", "maybe_trans_nz("),
            ("if enable_fused_mc2:", "if _should_trans_nz(layer.w13_weight):"),
            branches=branches,
        ),
    )


WEIGHTS = (
    *experts(FUSED_MOE, RELEASES),
    *experts(ROUTED, MAIN),
    Claim(
        "additional_config.enable_fused_mc2 sets it",
        CONFIG,
        "AscendConfig.__init__",
        ("self.enable_fused_mc2 = self._get_config_value(", "'enable_fused_mc2', 'VLLM_ASCEND_ENABLE_FUSED_MC2'"),
        ("'enable_fused_mc2'", "'fused_mc2'"),
    ),
    Claim(
        "latent attention copies the parts of new weights into the tensors that it computes with, and keeps the whole",
        MLA,
        f"AscendMLAImpl.{PROCESS}",
        (
            "if not hasattr(self, 'W_UV'):",
            "self.W_UV.copy_(W_UV.transpose(0, 1).contiguous())",
            "self.W_UK_T.copy_(W_UK.permute(1, 2, 0).contiguous())",
        ),
        ("self.W_UV.copy_(W_UV.transpose(0, 1).contiguous())", "pass"),
        absent=("dispose_layer(", "dispose_tensor("),
    ),
    Claim(
        "vLLM's layer of latent attention calls that after each loading",
        MLA_LAYER,
        "AscendMultiHeadLatentAttention.__init__",
        (
            "def wrapped_process_weights(act_dtype: torch.dtype): from",
            f"self.mla_attn.impl.{PROCESS}(act_dtype)",
            f"self.mla_attn.{PROCESS} = wrapped_process_weights",
        ),
        (f"self.mla_attn.{PROCESS} = wrapped_process_weights", ""),
    ),
    Claim(
        "sparse attention frees kv_b_proj after loading",
        SFA,
        f"AscendSFAImpl.{PROCESS}",
        ("dispose_layer(self.kv_b_proj)",),
        ("dispose_layer(self.kv_b_proj)", ""),
    ),
    Claim(
        "a freed tensor is empty",
        UTILS,
        "dispose_tensor",
        ("x.set_(torch.empty((0,)",),
        ("x.set_(torch.empty((0,)", "x.zero_(torch.empty((1,)"),
    ),
    Claim(
        "models with index_topk have sparse attention",
        UTILS,
        "model_uses_sfa_sparse",
        ("hasattr(hf_text_config, 'index_topk')",),
        ("index_topk", "index_k"),
    ),
    Claim(
        "0.23 frees weights of layers that layer_sharding names",
        "vllm_ascend/ops/layer_shard_linear.py",
        "",
        ("dispose_tensor(layer.weight)",),
        ("dispose_tensor(layer.weight)", "pass"),
        branches=OLDEST,
    ),
    Claim(
        "0.23 reads layer_sharding",
        CONFIG,
        "AscendConfig.__init__",
        ("additional_config.get('layer_sharding'",),
        ("layer_sharding'", "sharding'"),
        branches=OLDEST,
    ),
    *(
        Claim(
            "with multistream_overlap_shared_expert, processing experts runs the shared ones",
            file,
            f"{layer}.__init__",
            ("if self.multistream_overlap", f"result = original_process_weights(*args, **kwargs) self.{check}()"),
            (f"self.{check}()", "pass"),
            branches=branches,
        )
        for file, layer, check, branches in (
            (FUSED_MOE_023, "AscendFusedMoE", SHARED_CHECK, OLDEST),
            (FUSED_MOE, "AscendMoERunner", SHARED_CHECK, BETWEEN),
            (SHARED, "AscendSharedExperts", "validate_consistency", MAIN),
        )
    ),
    Claim(
        "on main, the table of experts' places is a buffer of the layer",
        ROUTED,
        "AscendRoutedExperts",
        ("self._promote_attr_to_buffer('log2phy')", "self.register_buffer(name, tensor)"),
        ("self.register_buffer(name, tensor)", "setattr(self, name, tensor)"),
        branches=MAIN,
    ),
)

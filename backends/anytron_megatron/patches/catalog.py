"""List the changes that the Megatron backend makes to third-party code: one constant for each.

The code of a patch is in the file that its ``replacement`` or ``install`` names; this file imports none of it.
Version ranges are measured: the tests show each fault on an affected version, and that the patch is skipped on the
others (``tox -e mcore012,mcore013,mcore014,mcore015,mcore016,mcore017,mcore018,mcore019``).
"""

from __future__ import annotations

from anytron.patches import Patch, Phase, Supersession

_HERE = "anytron_megatron.patches"
_MEGATRON = "megatron-core"
_BRIDGE, _BRIDGE_VERSIONS = "mcore-bridge", ">=1.6.5,<1.7"
_MLA = "megatron.core.transformer.multi_latent_attention"
_DELTA_NET = "mcore_bridge.model.modules.gated_delta_net"

TORCH_CUDA = Patch(
    id="megatron.torch-cuda",
    target="torch:cuda.current_device",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",  # Megatron imports functions of torch.cuda by name and keeps some as defaults
    reason="Megatron hard-codes torch.cuda, and the platform has another device",
    upstream="megatron-core 0.16.1: torch.cuda.current_device in 182 places",
    remove_when="Megatron asks torch.accelerator",
    install=f"{_HERE}.torch_cuda:redirect_to_platform",
)
TORCH_COMPILE = Patch(
    id="megatron.torch-compile",
    target="torch:compile",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",  # jit_fuser is bound to torch.compile when megatron.core.jit is imported
    reason=(
        "Megatron's jit_fuser is torch.compile, which needs a C++ compiler where there is no CUDA, compiles for "
        "seconds at the first step, and takes a second to import"
    ),
    upstream="megatron/core/jit.py, enable_jit_fuser",
    remove_when="Megatron has a switch for jit_fuser that works before its import",
    replacement=f"{_HERE}.torch_compile:leave_uncompiled",
)
IMPORT_NOISE = Patch(
    id="megatron.import-noise",
    target="warnings",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="Megatron, when imported, warns about its own deprecated imports and about Apex, on every rank",
    upstream="megatron-core 0.16.1; anytron_megatron/patches/import_noise.py lists the messages",
    remove_when="megatron-core can be imported without warnings",
    required=False,
    install=f"{_HERE}.import_noise:filter_messages",
)
TRITON_IMPORTS = Patch(
    id="megatron.triton-imports",
    target="triton",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="mcore-bridge and Megatron import triton without declaring it, and triton supports few devices",
    upstream=(
        "mcore_bridge/model/modules/kernels/qsa_block_sparse_attn.py, line 43; "
        "megatron/core/inference/contexts/attention_context/triton/tensor_ops.py, line 6"
    ),
    remove_when="both guard the import, as mcore_bridge/model/modules/kernels/ple_kernels.py does",
    install=f"{_HERE}.triton_stand_in:stand_in_for_triton",
)
PORTABLE_TRANSFORMER_ENGINE = Patch(
    id="megatron.portable-transformer-engine",
    target="transformer_engine",
    phase=Phase.BEFORE_IMPORT,
    reason="Megatron builds models from Transformer Engine's modules, which compute on CUDA devices only",
    upstream="https://github.com/NVIDIA/TransformerEngine",
    remove_when="Transformer Engine runs on the platform's device",
    install=f"{_HERE}.portable_modules:alias_portable_modules",
)

ONE_RANK_GROUPS = Patch(
    id="megatron.one-rank-groups",
    target="megatron.core.parallel_state:create_group",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=_MEGATRON,
    reason=(
        "Megatron makes about twenty groups of a single rank, which never communicate; over gloo each has three "
        "threads, one of which wakes up a hundred times a second"
    ),
    upstream="megatron/core/parallel_state.py, create_group; its arguments are the same from 0.12.3 to 0.19.2",
    remove_when="Megatron makes no groups of one rank, or torch starts no threads for them",
    replacement=f"{_HERE}.one_rank_groups:share_groups_of_one_rank",
)
MODEL_CODE = Patch(
    id="megatron.model-code",
    target="transformers.dynamic_module_utils:get_cached_module_file",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package="transformers",
    reason="mcore-bridge runs Python files of model directories of some families without asking for trust",
    upstream=(
        "mcore_bridge/model/mm_gpts/kimi_vl.py, lines 27 and 79, and internvl.py, llava.py, qwen.py: "
        "get_class_from_dynamic_module has no gate of its own"
    ),
    remove_when="neither mcore-bridge nor transformers can run a file of a model directory",
    replacement=f"{_HERE}.model_code:refuse_model_code",
)
BRIDGE_IMPORT = Patch(
    id="megatron.mcore-bridge-import",
    target="mcore_bridge",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=_BRIDGE,
    reason="mcore-bridge patches megatron-core and peft when it is imported, and does not say what",
    upstream="mcore_bridge/patcher.py, mcore_bridge/tuners/patcher.py",
    remove_when="mcore-bridge patches in a function instead of at its import",
    install=f"{_HERE}.bridge_import:import_bridge",
    stays=(
        "its modules stay imported, its logger stays set up, and transformers.models.auto.auto_mappings keeps the "
        "models that it made transformers import"
    ),
)
ROPE_TABLE = Patch(
    id="megatron.mcore-bridge-rope-table",
    target="mcore_bridge.model.rope:get_rope_inv_freq",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason=(
        "the function overwrites transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS['default'] with one that "
        "reads config.rope_theta; Hugging Face models made later in this process fail"
    ),
    upstream="mcore_bridge/model/rope.py, line 115",
    remove_when="mcore-bridge keeps a table of its own",
    replacement=f"{_HERE}.rope_table:keep_table",
)
CACHED_ROTARY = Patch(
    id="megatron.mcore-bridge-cached-rotary",
    target="mcore_bridge.model.gpt_model:GPTModel._preprocess",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason=(
        "generation with a cache of keys fails at its second token: rotary embeddings are made for the tokens of a "
        "step, as if there were no cache"
    ),
    upstream="mcore_bridge/model/gpt_model.py, line 187: _get_rotary_pos_emb is called without inference_context",
    remove_when="mcore-bridge passes inference_context on, as Megatron's own GPTModel does",
    replacement=f"{_HERE}.cached_rotary:tell_context",
)
ROTARY_KERNEL = Patch(
    id="megatron.rotary-kernel",
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    reason=(
        "Megatron rotates queries and keys in torch unless apply_rope_fusion is set, which takes a table of positions "
        "and not each token's angles; the platform's kernel takes those"
    ),
    upstream="megatron/core/models/common/embeddings/rope_utils.py, apply_rotary_pos_emb",
    remove_when="Megatron's fused rotary embeddings take the angles of each token",
    replacement=f"{_HERE}.rotary_kernel:rotate_by_kernel",
)
ROTARY_KERNEL_IN_LAYERS = Patch(
    id="megatron.mcore-bridge-rotary-kernel",
    target="mcore_bridge.model.modules.transformer_layer:TransformerLayer._patch_apply_rotary_pos_emb",
    phase=Phase.BEFORE_BUILD,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason="its layers put a function of their own, in torch, in the place of Megatron's while they compute",
    upstream="mcore_bridge/model/modules/transformer_layer.py, line 243",
    remove_when="mcore-bridge leaves the function alone where attention_scaling is 1",
    replacement=f"{_HERE}.rotary_kernel:rotate_in_layers",
)
DEEPSTACK = Patch(
    id="megatron.mcore-bridge-deepstack",
    target="mcore_bridge.model.mm_gpts.qwen3_vl:Qwen3VL_Vit._get_inputs_embeds",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason=(
        "with several padded rows, deepstack features reach the wrong images (and fail with context parallelism); "
        "with sequence parallelism their gradient is divided by the tensor-parallel size"
    ),
    upstream="mcore_bridge/model/mm_gpts/qwen3_vl.py, _get_inputs_embeds, lines 137 to 160",
    remove_when="the tests of these three faults pass without this patch",
    replacement=f"{_HERE}.deepstack:number_features",
)
HOST_GENERATOR_WARNING = Patch(
    id="megatron.host-generator-warning",
    target="megatron.core.tensor_parallel.random",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=_MEGATRON,
    reason=(
        "where the device draws from the host's generator, the RNG tracker warns at each use that the 'CPU RNG "
        "state changed within GPU RNG context'"
    ),
    upstream="megatron/core/tensor_parallel/random.py, CudaRNGStatesTracker.fork",
    remove_when="the tracker compares the generators before their states",
    required=False,
    install=f"{_HERE}.generator_warning:drop_warning",
)
PEFT_PROBES = tuple(
    Patch(
        id=f"megatron.peft-{name.replace('_', '-')}",
        target=f"peft.import_utils:{name}",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="peft",
        requires=">=0.19",
        reason="peft mistakes the portable modules for Transformer Engine, depending on the order of imports",
        upstream=f"peft/import_utils.py, {name}",
        remove_when="peft looks for Transformer Engine's distribution, as accelerate does",
        required=False,
        replacement=f"{_HERE}.peft_probes:deny_transformer_engine",
    )
    for name in ("is_te_available", "is_te_pytorch_available")
)

DELTA_NET_PADDING = Patch(
    id="megatron.gated-delta-net-padding",
    target=f"{_DELTA_NET}:GatedDeltaNet.forward",
    phase=Phase.BEFORE_BUILD,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason=(
        "the layer ignores the attention mask ('TODO: Deal with attention_mask'), so that padding enters its "
        "convolution and its recurrent state"
    ),
    upstream=(
        "https://github.com/modelscope/ms-swift/pull/9196; mcore_bridge/model/modules/gated_delta_net.py, line 215"
    ),
    remove_when="the layer takes a map of real tokens and leaves padding out",
    replacement=f"{_HERE}.delta_net_padding:leave_out_padding",
)
DELTA_NET_CONTEXT = Patch(
    id="megatron.gated-delta-net-context",
    target="megatron.core.ssm.gated_delta_net:tensor_a2a_cp2hp",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires="<0.18",
    reason=(
        "with context parallelism mcore-bridge's layer imports functions that Megatron does not have yet, and would "
        "exchange each packed sequence on its own"
    ),
    upstream=(
        "megatron-core 0.18.0, megatron/core/ssm/gated_delta_net.py, tensor_a2a_cp2hp; "
        "mcore_bridge/model/modules/gated_delta_net.py, line 275"
    ),
    remove_when="megatron-core before 0.18 is not supported, and mcore-bridge exchanges a packed buffer in one piece",
    install=f"{_HERE}.delta_net_context:install_exchange",
)
DELTA_NET_GRADIENTS = Patch(
    id="megatron.gated-delta-net-gradients",
    target=f"{_DELTA_NET}:GatedDeltaNet.__init__",
    phase=Phase.BEFORE_BUILD,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason=(
        "with tensor parallelism the input norm's gradient is tp times too large if sequence parallelism is on, and "
        "the output norm's covers one rank's heads only if it is off"
    ),
    upstream=(
        "mcore_bridge/model/modules/gated_delta_net.py, line 219: the sequence is gathered before the norm; "
        "megatron/core/distributed/finalize_model_grads.py, line 354: only q_layernorm and k_layernorm are summed"
    ),
    remove_when="mcore-bridge marks both parameters so that Megatron sums their gradients correctly",
    replacement=f"{_HERE}.delta_net_gradients:sum_partial_gradients",
)
DELTA_NET_KERNELS = Patch(
    id="megatron.gated-delta-net-kernels",
    target=f"{_DELTA_NET}:chunk_gated_delta_rule",
    phase=Phase.BEFORE_BUILD,
    package=_BRIDGE,
    requires=_BRIDGE_VERSIONS,
    reason="Gated DeltaNet layers compute with flash-linear-attention, which supports few devices",
    upstream=(
        "mcore_bridge/model/modules/gated_delta_net.py, line 20; "
        "megatron/core/ssm/gated_delta_net.py, line 104: ImportError without fla"
    ),
    remove_when="layers take their kernels from their module specs",
    install=f"{_HERE}.delta_net_kernels:install_kernels",
)
MLA_PACKED_ROTARY = Patch(
    id="megatron.mla-packed-rotary",
    target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires="<0.13",
    reason="packed queries of multi-latent attention are [T, 1, N, D]; the rotary embedding broadcasts over the 1",
    upstream="megatron-core 0.12.3, multi_latent_attention.py, qkv_up_proj_and_rope_apply; verl #6005",
    remove_when="megatron-core before 0.13 is not supported",
    replacement=f"{_HERE}.mla_packing:rotate_without_batch_dimension",
)
MLA_PACKED_QKV = Patch(
    id="megatron.mla-packed-qkv",
    target=f"{_MLA}:MLASelfAttention.get_query_key_value_tensors",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires="<0.13",
    reason="with packed sequences it returns [T, 1, N, D], and thd kernels take [T, N, D]",
    upstream="megatron-core 0.12.3, multi_latent_attention.py; verl #6005",
    remove_when="megatron-core before 0.13 is not supported",
    replacement=f"{_HERE}.mla_packing:drop_batch_dimension",
)
MLA_PADDED_POSITIONS = Patch(
    id="megatron.mla-padded-positions",
    target=f"{_MLA}:MLASelfAttention.get_query_key_value_tensors",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires="<0.14",
    reason="it splits a packed buffer by the real lengths, although sequences start at the padded ones",
    upstream="megatron-core 0.14.0, multi_latent_attention.py, line 511: 'if ... cu_seqlens_q_padded is not None'",
    remove_when="megatron-core before 0.14 is not supported",
    replacement=f"{_HERE}.mla_packing:rotate_at_padded_positions",
)
MLA_VALUES = Patch(
    id="megatron.mla-values",
    target=f"{_MLA}:MultiLatentAttention.forward",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    # 0.17.0 and 0.17.1 were released without #3003, which the branch of 0.16 got after 0.16.1, and 0.18.0 has.
    requires="<0.18,!=0.16.2",
    reason="packed attention kernels (Transformer Engine's, MindSpeed's TND) need values as wide as queries",
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/3003, verl #6005",
    remove_when="megatron-core before 0.18 is not supported",
    replacement=f"{_HERE}.mla_values:pad_values",
    superseded_by=(
        Supersession(
            target="mcore_bridge.model.modules.multi_latent_attention:MLASelfAttention.forward",
            package=_BRIDGE,
            requires=_BRIDGE_VERSIONS,
            reason="mcore-bridge's models use this class, whose own forward pads values",
        ),
    ),
)
MLA_QUERY_NORM = Patch(
    id="megatron.mla-query-norm",
    target="megatron.core.transformer.mla_qk_norm_config:QKNormConfigResolver._mla_fused_linear_or_default",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires=">=0.19",
    reason="where queries are not compressed (q_lora_rank is None), they get a norm that the model does not have",
    upstream="megatron-core 0.19.2, mla_qk_norm_config.py, _resolve_mla_qk_layernorm: linear_q_proj",
    remove_when="megatron-core takes the projection that the layer's spec names",
    replacement=f"{_HERE}.mla_query_norm:keep_query_projection",
)
ROUTER_PADDING = Patch(
    id="megatron.router-padding",
    target="megatron.core.transformer.moe.router:TopKRouter.forward",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires=">=0.16",
    reason=(
        "auxiliary losses and expert biases count padding: mcore-bridge's forward takes no padding mask, and its "
        "vision models drop unknown arguments (on later pipeline stages all of them)"
    ),
    upstream="mcore_bridge/model/gpt_model.py, forward; mcore_bridge/model/mm_gpt_model.py, line 125: kwargs = {}",
    remove_when="mcore-bridge's models take padding_mask, as Megatron's own GPTModel.forward does",
    replacement=f"{_HERE}.router_padding:mask_padding",
)
ROUTER_GEMM = Patch(
    id="megatron.router-gemm",
    target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    requires=">=0.13,<0.17",
    reason="without Transformer Engine the router raises NameError: name 'te_general_gemm' is not defined",
    upstream="megatron-core 0.16.1, moe_utils.py, lines 16 to 39 and 1192; 0.19 defines it as None",
    remove_when="megatron-core before 0.17 is not supported",
    install=f"{_HERE}.router_gating:define_missing_gemm",
)
PIPELINE_SENDS = Patch(
    id="megatron.pipeline-sends",
    target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
    phase=Phase.BEFORE_BUILD,
    package=_MEGATRON,
    reason=(
        "an interleaved pipeline frees a tensor before it is sent: over gloo the next stage receives whatever is "
        "in that memory by then, most often on a busy machine"
    ),
    upstream="megatron/core/pipeline_parallel/schedules.py, deallocate_output_tensor after an asynchronous send",
    remove_when="the schedule frees a tensor only after it was sent",
    replacement=f"{_HERE}.pipeline_sends:send_aliases",
)


def _one_rank_collective(suffix: str, name: str) -> Patch:
    return Patch(
        id=f"megatron.one-rank-collectives.{suffix}",
        target=f"megatron.core.distributed.param_and_grad_buffer:{name}",
        phase=Phase.BEFORE_BUILD,
        package=_MEGATRON,
        reason=(
            "the distributed optimizer of a single rank reduces and gathers buffers that are whole; over gloo that "
            "starts teams of OpenMP threads, after which no team of the process spins for its next operation"
        ),
        upstream="megatron/core/distributed/param_and_grad_buffer.py, start_grad_sync and start_param_sync",
        remove_when="Megatron communicates only in groups of several ranks",
        replacement=f"{_HERE}.one_rank_collectives:skip_for_one_rank",
        rebinds=False,  # torch's own function, which others call
    )


ONE_RANK_COLLECTIVES = (
    _one_rank_collective("reduce-gradients", "dist_reduce_scatter_func"),
    _one_rank_collective("gather-parameters", "dist_all_gather_func"),
)


def _recompute_scopes(suffix: str, target: str, function: str) -> Patch:
    return Patch(
        id=f"megatron.recompute-scopes{suffix}",
        target=target,
        phase=Phase.BEFORE_BUILD,
        package=_MEGATRON,
        reason=(
            "autograd recomputes a layer later and on a thread of its own, where it would see the device state of "
            "another micro-batch, or none"
        ),
        upstream="verl util.py, preprocess_for_mindspeed: recomputed functions read globals of the process",
        remove_when="no device needs process-global state around a micro-batch",
        replacement=f"{_HERE}.recompute_scopes:{function}",
    )


RECOMPUTE_SCOPES = _recompute_scopes("", "megatron.core.tensor_parallel.random:checkpoint", "rescope_function")
RECOMPUTE_SCOPES_WITHOUT_OUTPUT = _recompute_scopes(
    ".without-output", "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint", "rescope_method"
)
RECOMPUTE_SCOPES_TRANSFORMER_ENGINE = _recompute_scopes(
    ".transformer-engine", "megatron.core.extensions.transformer_engine:te_checkpoint", "rescope_function"
)

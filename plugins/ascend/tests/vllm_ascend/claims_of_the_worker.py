"""What Anytron's code and pages say of vllm-ascend's worker: its methods, sleep, log-probs and graphs."""

from __future__ import annotations

from plugins.ascend.tests.vllm_ascend.claims import CONFIG, MAIN, RELEASES, RUNNER, SAMPLER, VOCABULARY, WORKER, Claim

SLEEP = (
    Claim(
        "level 1 keeps weights in host memory, level 2 the buffers only",
        WORKER,
        "NPUWorker.sleep",
        ("if level == 2:", "model.named_buffers()", "offload_tags=('weights',) if level == 1 else tuple()"),
        ("if level == 1 else tuple()", ""),
    ),
    Claim(
        "waking up transposes the weights of experts that are not quantised",
        WORKER,
        "NPUWorker.wake_up",
        (
            "self.vllm_config.quant_config is None",
            "w2_data = param.transpose(1, 2)",
            "w13_data = param.transpose(1, 2)",
        ),
        ("w2_data = param.transpose(1, 2)", "w2_data = param"),
        branches=RELEASES,
    ),
    Claim(
        "on main, waking up leaves weights as they are",
        WORKER,
        "NPUWorker.wake_up",
        ("allocator.wake_up(tags=tags)",),
        ("allocator.wake_up(tags=tags)", "allocator.wake_up(tags=tags) w2_data = param.transpose(1, 2)"),
        absent=(".transpose(", "setattr("),
        branches=MAIN,
    ),
    Claim(
        "waking up is refused unless weight_nz_mode is 0",
        WORKER,
        "NPUWorker.wake_up",
        ("nz_mode = get_ascend_config().weight_nz_mode if nz_mode: raise ValueError(", "allocator.wake_up("),
        ("if nz_mode: raise", "if False: raise"),
    ),
)
LOG_PROBS = (
    Claim(
        "the sampler is built without vLLM's logprobs_mode",
        RUNNER,
        "NPUModelRunner.__init__",
        ("self.sampler = AscendSampler()",),
        ("AscendSampler()", "AscendSampler(logprobs_mode=self.model_config.logprobs_mode)"),
    ),
    Claim(
        "its own mode is raw_logprobs",
        SAMPLER,
        "",
        ("DEFAULT_LOGPROBS_MODE = 'raw_logprobs'", "def __init__(self, logprobs_mode=DEFAULT_LOGPROBS_MODE): super()"),
        ("'raw_logprobs'", "'processed_logprobs'"),
    ),
    Claim(
        "vLLM's own code computes log-probs, before penalties, temperature and filters",
        SAMPLER,
        "AscendSampler",
        ("class AscendSampler(Sampler):",),
        ("def prepare_sampling(", "def compute_logprobs("),
        absent=(
            "def forward(",
            "def sample(",
            "def compute_logprobs(",
            "def gather_logprobs(",
            "def apply_temperature(",
        ),
    ),
    Claim(
        "a request with a seed draws with a generator of its own",
        SAMPLER,
        "random_sample",
        ("for i, generator in generators.items(): q[i].exponential_(generator=generator)",),
        ("q[i].exponential_(generator=generator)", "q[i].exponential_()"),
    ),
    Claim(
        "after a part of a prompt the generator is set back by 4",
        RUNNER,
        "NPUModelRunner._bookkeeping_sync",
        ("gen.set_offset(gen.get_offset() - 4)",),
        ("- 4", "- 10"),
    ),
    Claim(
        "with enable_reduce_sample logits of other processes are not gathered",
        VOCABULARY,
        "_get_logits_normal",
        ("if not get_ascend_config().enable_reduce_sample: logits = self._gather_logits(logits)",),
        ("if not get_ascend_config().enable_reduce_sample: logits", "logits"),
    ),
    Claim(
        "enable_reduce_sample is off unless it is set",
        CONFIG,
        "AscendConfig.__init__",
        ("additional_config.get('enable_reduce_sample', False)",),
        ("'enable_reduce_sample', False", "'enable_reduce_sample', True"),
    ),
)
METHODS = (
    Claim(
        "the worker is vLLM's, with the device and the runner that Anytron's methods use",
        WORKER,
        "NPUWorker",
        (
            "class NPUWorker(WorkerBase):",
            "self.device = self._init_device()",
            "self.model_runner = NPUModelRunner(self.vllm_config, self.device)",
        ),
        ("self.device = self._init_device()", "self.npu = self._init_device()"),
        absent=("anytron",),
    ),
    Claim(
        "get_model returns the model itself, not its graphs",
        RUNNER,
        "NPUModelRunner.get_model",
        ("if isinstance(self.model, ACLGraphWrapper): return self.model.unwrap() return self.model",),
        ("return self.model.unwrap()", "pass"),
    ),
    Claim(
        "logits are computed by the model's own method, outside of its graphs",
        RUNNER,
        "NPUModelRunner.execute_model",
        ("self.model.compute_logits(sample_hidden_states)",),
        ("self.model.compute_logits(", "self.logits("),
    ),
    Claim(
        "a wrapper for graphs passes attributes of the model on",
        "vllm_ascend/compilation/acl_graph.py",
        "ACLGraphWrapper.__getattr__",
        ("if hasattr(self.runnable, key): return getattr(self.runnable, key)",),
        ("return getattr(self.runnable, key)", "pass"),
    ),
    Claim(
        "the second model runner is used only if VLLM_USE_V2_MODEL_RUNNER asks for it",
        "vllm_ascend/patch/platform/patch_use_v2_model_runner.py",
        "_patched_use_v2_model_runner",
        ("use_v2 = envs.VLLM_USE_V2_MODEL_RUNNER if use_v2 is not None: return use_v2 return False",),
        ("return False", "return True"),
    ),
    Claim(
        "an adapter is added by vLLM's own manager",
        WORKER,
        "NPUWorker.add_lora",
        ("return self.model_runner.add_lora(lora_request)",),
        ("self.model_runner.", "self."),
    ),
)

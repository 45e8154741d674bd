import pytest
import torch
from torch.utils import _device as device_mode

from anytron.base.errors import EngineError
from anytron_megatron.redirect.devices import DeviceTranslator
from anytron_megatron.redirect.tensors import OTHER_FACTORIES, TORCH_FACTORIES

pytestmark = pytest.mark.usefixtures("redirected")
CUDA_NAMES = ["cuda", "cuda:0", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0]


@pytest.mark.parametrize("name", CUDA_NAMES, ids=str)
def test_every_way_to_name_a_cuda_device_means_the_runtimes(name):
    source = torch.empty(2, dtype=torch.float64)
    for made in (
        torch.zeros(2, device=name),
        torch.tensor([1.0], device=name),
        torch.arange(3, device=name),
        torch.empty_like(source, device=name),
        source.new_zeros(2, device=name),
        source.to(name),
        source.to(device=name),
        source.to(name, torch.float32),
        source.cuda(name),
        source.cuda(),
        torch.nn.Linear(2, 2, device=name).weight,
        torch.nn.Linear(2, 2).to(name).weight,
        torch.nn.Linear(2, 2).to(device=name).weight,
        torch.nn.Linear(2, 2).cuda().weight,
        torch.fft.fftfreq(4, device=name),
    ):
        assert made.device == torch.device("cpu")


@pytest.mark.parametrize("name", CUDA_NAMES, ids=str)
def test_arguments_of_to_that_are_parsed_in_c(name):
    # TensorDict.to, verl's way to bring a batch to the device, asks C++ what it was called with.
    parse = torch._C._nn._parse_to
    assert parse(name, torch.float16, True) == (torch.device("cpu"), torch.float16, True, None)
    assert parse(device=name)[0] == torch.device("cpu")
    assert parse(torch.float16)[:2] == (None, torch.float16)
    assert parse(torch.ones(1, device="meta"))[0] == torch.device("meta")
    assert parse(dtype=torch.float16, non_blocking=True) == (None, torch.float16, True, None)


def test_every_device_constructor_of_torch_is_redirected():
    places = [*((torch, name) for name in TORCH_FACTORIES), *OTHER_FACTORIES]
    replaced = {getattr(owner, name).__wrapped__ for owner, name in places}
    assert device_mode._device_constructors() - replaced == set()


def test_other_devices_and_arguments_are_left_alone():
    assert torch.zeros(2, device="meta").is_meta
    assert torch.ones(2).to("meta").is_meta
    assert torch.ones(2).to(torch.float64).dtype is torch.float64
    assert torch.ones(2).to(torch.zeros(1, dtype=torch.int32)).dtype is torch.int32
    assert torch.full((2,), 0).tolist() == [0, 0]


def test_devices_with_indices_keep_them(runtime):
    class Indexed(type(runtime)):
        def current_device(self):
            return torch.device("xpu", 2)

    translate = DeviceTranslator(Indexed())
    assert translate("cuda") == translate(torch.device("cuda")) == torch.device("xpu", 2)
    assert translate("cuda:1") == translate(1) == torch.device("xpu", 1)
    assert translate("cpu") == "cpu"
    assert translate(None) is None


def test_a_meta_device_scope_still_reaches_the_factories():
    # transformers' from_pretrained builds on meta and then fills; buffers that escape it are garbage.
    with torch.device("meta"):
        assert torch.arange(4).is_meta
        assert torch.zeros(4, device="cuda").device.type == "cpu"  # named explicitly: wins, as ever
    assert not torch.arange(4).is_meta


def test_from_pretrained_gives_the_same_rotary_frequencies(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_cuda_device_scope_is_the_runtimes():
    with torch.device("cuda"):
        assert torch.ones(2).device.type == "cpu"
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device.type == "cpu"


def test_autocast_for_cuda_is_autocast_for_the_runtime():
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_questions_about_the_device_are_answered_by_the_runtime(redirected):
    assert torch.cuda.current_device() == 0
    assert torch.cuda.device_count() == 3
    assert torch.cuda.get_device_capability() == (7, 5)
    assert torch.cuda.get_device_name(0) == "the host"
    assert torch.cuda.get_device_properties(0).total_memory == 100
    assert torch.cuda.is_bf16_supported() is False
    assert torch.cuda.nccl.version() == (0, 0, 0)
    torch.cuda.set_device("cuda:0")
    torch.cuda.synchronize()
    assert redirected.calls == [("set_device", 0), "synchronize"]


def test_a_device_without_a_capability_has_that_of_the_portable_modules(redirected, monkeypatch):
    # megatron.training demands 8.0 for grouped matrix products, which the portable modules have, and 8.9 means FP8.
    monkeypatch.setattr(redirected, "compute_capability", lambda: (0, 0))
    assert (8, 0) <= torch.cuda.get_device_capability() < (8, 9)
    assert torch.cuda.get_device_properties(0).major == 8


def test_random_states_for_graphs_are_refused_by_name():
    with pytest.raises(EngineError, match="leave use_cudagraphable_rng off"):
        hasattr(torch.cuda.CUDAGraph, "register_generator_state")


def test_cuda_itself_is_not_available():
    assert torch.cuda.is_available() is False


def test_saved_tensors_are_loaded_onto_the_runtimes_device(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt", map_location="cuda")["w"].device.type == "cpu"


def test_pinning_is_dropped_where_the_runtime_cannot():
    assert torch.empty(2, pin_memory=True).tolist() is not None
    tensor = torch.ones(2)
    assert tensor.pin_memory() is tensor


@pytest.mark.parametrize("name", ["CUDAGraph", "MemPool", "ExternalStream", "graph"])
def test_features_of_cuda_alone_may_be_named_and_not_made(name):
    cls = getattr(torch.cuda, name)
    assert not isinstance(object(), cls)
    with pytest.raises(EngineError, match=f"torch.cuda.{name} has no counterpart"):
        cls()

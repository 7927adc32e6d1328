"""Which kernels run on which GPU: those of each chip's own architecture, and on a chip not known here none at all."""

import importlib.util
import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import blockscale as bs
from blockscale import backends, plan, store
from blockscale.backends import gpu, sm120
from blockscale.config import Config
from blockscale.launch import cuda
from blockscale.problem import TARGETS, Problem, compiled_for, target_named, target_of_capability

CHIPS = [target_named("sm_120a"), target_named("sm_121a")]
UNKNOWN = [(12, 2), (12, 9), (13, 0)]


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch see GPUs that are not here: `gpus((12, 0), (12, 1))`; `sms` and `l2` are those of each."""

    def see(*capabilities, sms=170, l2=96 * 2**20):
        properties = SimpleNamespace(multi_processor_count=sms, L2_cache_size=l2)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: capabilities[getattr(at, "index", at)])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda at=0: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at=0: properties)
        spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tvm_ffi" or spec(name))

    return see


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
def test_a_chip_gets_the_kernels_of_its_own_architecture(gpus, chip):
    """One is enough for the backend; the other's kernels are refused, since they do not load."""
    gpus(chip.capability)
    device = torch.device("cuda:0")
    assert bs.available_backends()["sm120"] is None
    assert backends.pick(None, device) is sm120
    assert sm120._target(device).arch == chip.arch
    other = CHIPS[chip is CHIPS[0]]
    for launcher in (cuda.CudaLauncher, gpu.launcher):
        with pytest.raises(ValueError, match=rf"\({other.arch}\); cuda:0 has {'.'.join(map(str, chip.capability))}$"):
            launcher(other, device)


@pytest.mark.parametrize("capability", UNKNOWN, ids=str)
def test_an_unknown_chip_is_refused_everywhere(gpus, capability):
    """By number, with what there are kernels for: by no backend, by no launcher, by no name."""
    gpus(capability)
    device, number = torch.device("cuda:0"), ".".join(map(str, capability))
    assert target_of_capability(capability) is None
    assert {name for name, reason in bs.available_backends().items() if reason is None} == {"cpu"}
    assert f"; no kernels of this version are for {number}" in bs.available_backends()["sm120"]
    for name in ("sm90", "sm100", "sm120"):
        assert number in bs.available_backends()[name]
        with pytest.raises(ValueError, match=f"'{name}' cannot run here: .*needs a GPU of compute capability"):
            backends.pick(name, device)
    with pytest.raises(ValueError, match=re.escape(f"{number}; this version's kernels are compiled for 10.0")):
        backends.pick(None, device)
    for chip, launcher in itertools.product(CHIPS, (cuda.CudaLauncher, gpu.launcher)):
        with pytest.raises(ValueError, match=re.escape(f"cuda:0 has {number}; this version's kernels are for")):
            launcher(chip, device)
    with pytest.raises(ValueError, match=re.escape("'rtx5090' (sm_120a)")):
        target_named(f"sm_{number.replace('.', '')}a")


def test_a_known_chip_beside_an_unknown_one(gpus):
    gpus((12, 2), (12, 0))
    assert bs.available_backends()["sm120"] is None
    assert backends.pick(None, torch.device("cuda:1")) is sm120
    with pytest.raises(ValueError, match=r"none for cuda:0, a GPU of compute capability 12\.2"):
        backends.pick(None, torch.device("cuda:0"))
    for launcher in (cuda.CudaLauncher, gpu.launcher):
        with pytest.raises(ValueError, match=r"cuda:0 has 12\.2; this version's kernels are for"):
            launcher(sm120._target(torch.device("cuda:0")), torch.device("cuda:0"))


def test_what_there_are_kernels_for_is_said_once_each():
    assert compiled_for().count("sm_120a") == 1
    assert set(re.findall(r"sm_\w+", compiled_for())) == {target.arch for target in TARGETS}


@pytest.mark.parametrize("target", [t for t in TARGETS if t.backend == "sm120"], ids=lambda target: target.name)
def test_a_gpu_is_known_by_its_multiprocessors(gpus, target):
    """The 12.0 of 84 multiprocessors is no RTX PRO 6000, and gets what `explain --gpu rtx5080` prints; another number
    is what is there, by the first one's name."""
    gpus(target.capability, sms=target.sms, l2=target.l2 - 4096)
    assert backends.target_here(torch.device("cuda:0")) == target
    gpus(target.capability, sms=36, l2=2**24)
    here = backends.target_here(torch.device("cuda:0"))
    assert (here.arch, here.sms, here.l2) == (target.arch, 36, 2**24)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.arch)
def test_kernels_are_compiled_for_the_chip_itself(chip):
    """Neither for the other chip nor without the suffix, and every product is one at full rate: a block-scaled
    instruction over k = 64 with E4M3 scales."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    made = plan.artefact(Problem(64, 64, 128), chip, Config((64, 64)), store.default_store())
    ptx = made.parts["ptx"].read_text()
    assert re.findall(r"^\.target (\S+)", ptx, re.MULTILINE) == [chip.arch]
    products = re.findall(r"\bmma\.sync\S*", ptx)
    assert set(products) == {
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    }


def test_the_chips_get_the_same_kernels():
    """So that what is proven of one is of the other's too: the PTX differs in the name of the chip alone."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    texts = set()
    for chip in CHIPS:
        made = plan.artefact(Problem(64, 64, 128), chip, Config((64, 64)), store.default_store())
        texts.add(re.sub(r"//.*", "", made.parts["ptx"].read_text()).replace(chip.arch, "CHIP"))
    assert len(texts) == 1

"""torch tensors on the emulated NPU, in processes of their own: torch_npu changes torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from ems.testing import LocalPool
from ems.testing.child import child_environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

BUFFERS = """
import torch, torch_npu
from ems import CcConfig, CcKvOption, Ems, EmsConfig, KvBufferWrapper
from ems.testing.emulated_npu import EmulatedNpu

Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m")))
cc, option = Ems.get_cc(), CcKvOption()
torch.npu.set_device(0)

source = torch.arange(24, dtype=torch.float16).view(2, 3, 4).to("npu:1")
assert (source.device.type, source.device.index, source.dtype) == ("npu", 1, torch.float16)
target = torch.zeros(2, 3, 4, dtype=torch.float16, device="npu:2")
wrap = KvBufferWrapper.from_tensor
assert cc.save(option, ["a"], [[wrap(source[0]), wrap(source[1])]]).success == 1
assert cc.load(option, ["a"], [[wrap(target)]]).success == 1
assert target.cpu().equal(source.cpu())
host = torch.zeros(24, dtype=torch.float16)
assert cc.load(option, ["a"], [[wrap(host)]]).success == 1  # EMS_DEVICE=auto
assert host.view(2, 3, 4).equal(source.cpu())
try:
    cc.save(option, ["b"], [[wrap(source), wrap(host)]])
except Exception as error:
    assert "EMS_INVALID_ARGUMENT" in str(error), error
else:
    raise AssertionError("a mixture was saved")

# Behind a kernel on a stream that is not the default one.
npu, stream = EmulatedNpu(), torch.npu.Stream(1)
torch.npu.set_device(1)
with torch.npu.stream(stream):
    npu.launch_fill(source.data_ptr(), 48, 0, delay_us=100_000, stream=stream.npu_stream)
    future = cc.async_save(option, ["c"], [[wrap(source)]])
assert future.result().success == 1
assert cc.load(option, ["c"], [[wrap(target)]]).success == 1
assert target.cpu().equal(torch.zeros(2, 3, 4, dtype=torch.float16))
print("done")
"""

REGISTERED = """
import torch, torch_npu
from ems import CcConfig_v1, CcKvOption, Ems, EmsConfig

Ems.init(EmsConfig(cc_config_v1=CcConfig_v1(rank_id=0, device_id=0, model_id="m")))
cc, option = Ems.get_cc(), CcKvOption()
shape = (4, 16, 2, 8)  # blocks, slots of a block, heads, size of a head

def layers(value):
    return [[torch.full(shape, value + n, dtype=torch.float16).to("npu:3") for n in (l, l + 10)]
            for l in range(3)]

kvcache = layers(1)
cc.register_kvcache(kvcache)
slots, hashes, offsets = [*range(16, 32), *range(48, 64)], [-5, 7], [16, 16]
assert cc.save(slots, hashes, offsets, option).success == 2
for layer in kvcache:
    for tensor in layer:
        tensor.zero_()
future = cc.async_load(slot_mapping=slots, hashes=hashes, offsets=offsets, option=option)
assert future.result().success == 2
for l, layer in enumerate(kvcache):
    for n, tensor in enumerate(layer):
        got = tensor.cpu()
        assert (got[1] == 1 + l + 10 * n).all() and (got[3] == 1 + l + 10 * n).all()
        assert not got[0].any() and not got[2].any()
print("done")
"""


@pytest.mark.parametrize("program", [BUFFERS, REGISTERED], ids=["buffers", "registered"])
def test_tensors(program: str, npu_environment: dict[str, str]) -> None:
    inherited = child_environment()
    path = os.pathsep.join([npu_environment["PYTHONPATH"], inherited["PYTHONPATH"]])
    with LocalPool("16MiB") as pool:
        done = subprocess.run(
            [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-c", program],
            env={**inherited, **npu_environment, "PYTHONPATH": path, "EMS_ROOT": pool.root},
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

"""Where no CUDA device can be used: nothing is half there, the reason is given, and the host works on."""

import pytest
from helpers.driver_sim import simulated

import kina
import kina.cuda

pytestmark = pytest.mark.no_device


def test_there_are_no_devices_and_a_reason():
    assert kina.devices() == []
    assert len(kina.unavailable_reason()) > 20
    assert ("no CUDA-capable device" in kina.unavailable_reason()) == simulated()


@pytest.mark.parametrize(
    "use",
    [
        lambda: kina.session("cuda:0").__enter__(),
        lambda: kina.session(0).__enter__(),
        lambda: kina.zeros(3, device="cuda"),
        lambda: kina.Runtime(0),
        lambda: kina.cuda.device_info(0),
    ],
    ids=["session", "ordinal", "zeros", "Runtime", "device_info"],
)
def test_every_use_gives_the_reason(use):
    for _ in range(2):  # the first one looked for the driver; the second remembers
        with pytest.raises(kina.UnavailableError) as raised:
            use()
        assert kina.unavailable_reason() in str(raised.value)


def test_the_host_works_on(host):
    assert host.to_host(host.full(2, 3)).tolist() == [3, 3]

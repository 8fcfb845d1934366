"""The four identities never stand in for one another."""

import copy
import pickle

import pytest

import kina


def test_device_id_is_a_number_compared_by_value():
    assert kina.DeviceId(1) == kina.DeviceId(1) != kina.DeviceId(2)
    assert kina.DeviceId(1) < kina.DeviceId(2)
    assert kina.DeviceId(1) != 1
    assert (str(kina.DeviceId(3)), kina.DeviceId(3).ordinal) == ("cuda:3", 3)
    assert pickle.loads(pickle.dumps(kina.DeviceId(3))) == kina.DeviceId(3)


@pytest.mark.parametrize(("value", "kind"), [(-1, ValueError), (True, TypeError), ("0", TypeError), (1.0, TypeError)])
def test_bad_device_ids(value, kind):
    with pytest.raises(kind):
        kina.DeviceId(value)


def test_device_uuid_is_sixteen_opaque_bytes():
    octets = bytes(range(16))
    assert kina.DeviceUuid(octets) == kina.DeviceUuid(bytearray(octets))
    assert str(kina.DeviceUuid(octets)) == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert bytes(kina.DeviceUuid(octets)) == octets
    with pytest.raises(ValueError, match="16 bytes"):
        kina.DeviceUuid(b"short")


@pytest.mark.parametrize("kind", [kina.RuntimeIdentity, kina.AllocationDomainId])
def test_issued_identities_cannot_be_made(kind):
    with pytest.raises(TypeError, match="cannot be constructed"):
        kind()


def test_issued_identities_stay_in_their_process(host):
    with pytest.raises(TypeError):
        pickle.dumps(host.runtime_identity)
    with pytest.raises(TypeError):
        copy.copy(host.allocation_domain)


def test_kinds_are_never_equal(host):
    number = host.runtime_identity._number
    assert kina.AllocationDomainId._issue(number) != kina.RuntimeIdentity._issue(number)
    assert host.runtime_identity == kina.RuntimeIdentity._issue(number)
    assert len({kina.AllocationDomainId._issue(5), kina.RuntimeIdentity._issue(5), kina.DeviceId(5), 5}) == 4

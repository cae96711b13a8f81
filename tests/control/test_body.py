"""What is wrong with the body of a claim is told by the field's path and with what is allowed."""

import re

import pytest

from agent.control.body import BodyError, PrepareBody, addresses, read
from agent.host.model import Address

A, B = Address("0000:03:00.0"), Address("0000:04:00.0")
NAMES = {"intel.com/gpu=0": A, "intel.com/gpu=1": B, "intel.com/npu=0": B}
OBJECT = "it must be a JSON object with devices"
DEVICES = "devices must be a list of 1 to 512 PCI addresses or names of published devices"
LEASE = "lease must be seconds, more than 0 and at most 31536000"
FIELDS = "devices, mode, named, driver, force, from_vfio, dry_run, lease, owner_pid"


def with_devices(more: str) -> str:
    return f'{{"devices": ["03:00.0"], {more}}}'


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", f"the body is missing; {OBJECT}"),
        ("{", f"the body is not JSON; {OBJECT}"),
        ("[" * 60_000, f"the body is not JSON; {OBJECT}"),
        (with_devices('"lease": NaN'), f"the body is not JSON; {OBJECT}"),
        ("7", "the body must be a JSON object with devices, not 7"),
        ("[]", "the body must be a JSON object with devices, not an empty list"),
        ("{}", f"devices is missing; it must be{DEVICES.removeprefix('devices must be')}"),
        ('{"device": []}', 'there is no field "device"; did you mean devices?'),
        ('{"colour": 1}', f'there is no field "colour"; there are {FIELDS}'),
        ('{"devices": []}', f"{DEVICES}, not an empty list"),
        ('{"devices": "03:00.0"}', f'{DEVICES}, not "03:00.0"'),
        ('{"devices": null}', f"{DEVICES}, not null"),
        ('{"devices": ["03:00.0", 1]}', "devices[1] must be text, not 1"),
        (with_devices('"mode": "VFIO"'), 'mode must be vfio or drm, not "VFIO"'),
        (with_devices('"mode": null'), "mode must be vfio or drm, not null"),
        (with_devices('"named": {}'), "named must be a list of at most 512 PCI addresses, not an"),
        (with_devices('"force": "yes"'), 'force must be true or false, not "yes"'),
        (
            with_devices('"driver": "../x"'),
            'driver must be the name of a driver (1 to 64 letters, digits, _ and -), not "../x"',
        ),
        (with_devices('"lease": 0'), f"{LEASE}, not 0"),
        (with_devices('"lease": 1e30'), f"{LEASE}, not 1e30"),
        (with_devices('"lease": "5m"'), f'{LEASE}, not "5m"'),
        (with_devices('"owner_pid": -1'), "owner_pid must be the number of a process, not -1"),
        (with_devices(f'"driver": "{"x" * 999}"'), f'_ and -), not "{"x" * 59}…'),
    ],
)
def test_one_sentence_with_what_is_allowed(body: str, sentence: str) -> None:
    with pytest.raises(BodyError, match=re.escape(sentence)) as caught:
        read(body.encode())
    for word in ("$", "msgspec", "Expected", "`", "<="):
        assert word not in caught.value.sentence


def test_what_may_be_left_out_may_be_null() -> None:
    body = read(with_devices('"driver": null, "lease": null, "owner_pid": null').encode())
    assert body == PrepareBody(devices=("03:00.0",))


def test_devices_are_called_by_address_or_by_name() -> None:
    assert addresses(NAMES, ("intel.com/npu=0", "03:00.0"), "devices") == (B, A)


@pytest.mark.parametrize(
    ("text", "sentence", "hint"),
    [
        (
            "intel.com/gpu=all",
            'devices[1]: "intel.com/gpu=all" is every device of its kind, and cannot be claimed',
            "name each device by itself: intel.com/gpu=0, intel.com/gpu=1",
        ),
        (
            "amd.com/gpu=all",
            "as such",
            "name each device by itself: none of this kind is published",
        ),
        (
            "gpu0",
            'or the name of a published device, not "gpu0"',
            "`cdi-agent scan` lists what this host has and what is published",
        ),
    ],
)
def test_what_is_no_device_is_told_with_what_to_do(text: str, sentence: str, hint: str) -> None:
    with pytest.raises(BodyError, match=re.escape(sentence)) as caught:
        addresses(NAMES, ("03:00.0", text), "devices")
    assert caught.value.hint == hint

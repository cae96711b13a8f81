"""A journal that is whole and says nonsense is unusable: nothing of it is believed."""

from typing import Final

import pytest
from msgspec import structs

from agent.host.model import Address
from agent.vfio.model import Durable, Step, Write
from agent.vfio.orders import recovery
from agent.vfio.soundness import find_nonsense
from tests.vfio.journals import CHILD, FULL, GPU, ORIGINS, RECORD, STRAY

RECOVERY: Final = recovery(ORIGINS[0], now=1.0, client="").record


def record(**changes: object) -> Durable:
    return Durable(claims=(structs.replace(RECORD, **changes),))


def request(**changes: object) -> Durable:
    return record(request=structs.replace(RECORD.request, **changes))


def origin(**changes: object) -> Durable:
    return record(origins=(structs.replace(ORIGINS[0], **changes), ORIGINS[1]))


def stray(**changes: object) -> Durable:
    return Durable(
        strays=(structs.replace(STRAY, origin=structs.replace(STRAY.origin, **changes)),)
    )


def child(**changes: object) -> Durable:
    return Durable(children=(structs.replace(CHILD, **changes),))


def wrote(value: str, address: Address = GPU) -> Durable:
    return child(write=Write("vm", address, Step.OVERRIDE, value))


@pytest.mark.parametrize(
    "durable",
    [
        pytest.param(Durable(), id="nothing"),
        pytest.param(FULL, id="everything"),
        pytest.param(Durable(claims=(RECOVERY,)), id="recovery"),
        pytest.param(origin(driver=None, target=None, override=None), id="no driver"),
        pytest.param(origin(target="", override="what others wrote "), id="any driver"),
        pytest.param(child(pid=0, started=None), id="a process of another's"),
        pytest.param(wrote("\n"), id="an override that was cleared"),
    ],
)
def test_what_an_agent_writes_can_be_believed(durable: Durable) -> None:
    assert find_nonsense(durable) is None


@pytest.mark.parametrize(
    ("durable", "what"),
    [
        pytest.param(child(pid=2**40), "a process", id="huge pid"),
        pytest.param(child(pid=-1), "a process", id="negative pid"),
        pytest.param(child(started=-1), "a process", id="negative start"),
        pytest.param(child(started=2**63), "a process", id="huge start"),
        pytest.param(request(owner_pid=2**62), "a process", id="huge owner"),
        pytest.param(request(owner_pid=-1), "a process", id="negative owner"),
        pytest.param(request(owner_started=2**64), "a process", id="huge start of an owner"),
        pytest.param(wrote("x\0y"), "a write", id="NUL written"),
        pytest.param(wrote("x\ny"), "a write", id="two lines written"),
        pytest.param(wrote("\n", Address("..")), "a function", id="write to elsewhere"),
        pytest.param(origin(driver="x\0y"), "a driver", id="NUL in a driver"),
        pytest.param(origin(driver="x\ny"), "a driver", id="newline in a driver"),
        pytest.param(origin(driver="../../evil"), "a driver", id="path for a driver"),
        pytest.param(origin(driver=".."), "a driver", id="folder above for a driver"),
        pytest.param(origin(driver="x" * 256), "a driver", id="long driver"),
        pytest.param(origin(target="a/b"), "a driver", id="path for a target"),
        pytest.param(origin(override="x\0y"), "a driver_override", id="NUL in an override"),
        pytest.param(origin(override="x\ny"), "a driver_override", id="newline in an override"),
        pytest.param(origin(override="x" * 4096), "a driver_override", id="long override"),
        pytest.param(origin(override="\ud800\n"), "a driver_override", id="surrogate"),
        pytest.param(origin(address=Address("../x")), "a function", id="origin elsewhere"),
        pytest.param(stray(address=Address("x")), "a function", id="stray elsewhere"),
        pytest.param(stray(driver="a/b"), "a driver", id="stray's driver"),
        pytest.param(request(devices=(Address("x"),)), "a function", id="device elsewhere"),
        pytest.param(request(named=(Address("x"),)), "a function", id="named elsewhere"),
        pytest.param(
            request(devices=(Address("0000:99:00.0"),)), "lacks a device", id="device forgotten"
        ),
        pytest.param(record(origins=()), "no device", id="no device"),
        pytest.param(record(origins=ORIGINS[:1] * 2), "twice", id="device twice"),
        pytest.param(Durable(claims=(RECORD, RECORD)), "two claims", id="claim twice"),
        pytest.param(
            Durable(claims=(RECORD, RECOVERY)), "twice in its claims", id="device of two claims"
        ),
        pytest.param(request(id="../\n\x1b"), "cannot be called so", id="odd id"),
        pytest.param(request(id=""), "cannot be called so", id="no id"),
        pytest.param(request(id=f"recover:{GPU}"), "a recovery", id="claim called a recovery"),
        pytest.param(record(recovery=True), "a recovery", id="recovery called a claim"),
        pytest.param(record(names=("\x1b[31m\n",)), "a name", id="odd name"),
        pytest.param(record(since=float("nan")), "a moment", id="NaN"),
        pytest.param(record(expires_at=float("inf")), "a moment", id="infinity"),
        pytest.param(request(lease=float("-inf")), "a moment", id="negative infinity"),
    ],
)
def test_what_no_agent_can_have_written_is_nonsense(durable: Durable, what: str) -> None:
    found = find_nonsense(durable)
    assert found is not None
    assert what in found

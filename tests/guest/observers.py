"""Who looks at the agent in a guest without being of it: judge and witness, and what they answer.

Both are programs of `inside/`, started once before a guest is frozen, so that every resumed guest
has them at hand; both know nothing of the agent's code.
"""

import dataclasses
import json
from typing import Any, Final

from tests.guest.image import INSIDE
from tests.guest.rig import Guest

TOOLS: Final = "/root/tools"
SPECS: Final = "/run/cdi"
AGENT: Final = "cdi-agent.service"

_JUDGE: Final = "/run/judge"
_SECONDS: Final = 150.0  # a bound for a machine that is busy with other things
_SAW: Final = "/run/witness.jsonl"
_WITNESS: Final = "agent-witness"

VIRTIO_GPU: Final = "virtio.org/gpu"
DISPLAY: Final = "qemu.org/display"
RULES: Final = (
    {"kind": VIRTIO_GPU, "vendor": "1af4", "class": "03", "needs": ["card", "render"]},
    {"kind": DISPLAY, "vendor": "1234", "class": "03", "needs": ["card"]},
)
"""What the oracle is told of the profiles: the program's own of virtio-gpu, and config.yaml's."""

USABLE: Final = {"opens": True, "error": None, "viable": True}

Json = dict[str, Any]
Kinds = dict[str, dict[str, list[str]]]


class DisagreeError(AssertionError):
    """What is published is not what should be, and did not become so; the text shows both."""


@dataclasses.dataclass(frozen=True, slots=True)
class Agreed:
    """What judge, oracle and agent agreed on, at one moment of rest."""

    specs: Kinds
    """{kind: {device: [node, ...]}}, `all` among the devices."""
    functions: Json
    """Displays, and what else is on VFIO, as the oracle sees them."""
    metrics: dict[str, float]
    """The agent's, without `cdi_agent_`, labels included."""
    usable: Json
    """Of each VFIO group in the specs: `opens`, `error`, `viable`."""

    def total(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        return sum(v for key, v in self.metrics.items() if key.partition("{")[0] == name)

    @property
    def writes(self) -> float:
        """How many spec files the agent has written or deleted since it began."""
        return self.total("spec_writes_total") + self.total("spec_deletes_total")


def start(guest: Guest) -> None:
    """Start judge and witness in a guest; their logs begin here."""
    guest.push(INSIDE, f"{TOOLS}/inside")
    python = ("/usr/bin/env", f"PYTHONPATH={TOOLS}", "python3", "-m")
    guest.start("agent-judge", *python, "inside.judge", _JUDGE)
    guest.start(_WITNESS, *python, "inside.witness", SPECS, _SAW)
    guest.wait_until(f"grep -q ready {_SAW} && test -p {_JUDGE}/in")


class Observers:
    """The judge and the witness of one guest."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def agree(self, **wanted: object) -> Agreed:
        """Wait until all agree (`inside/judge.py` says on what, and what can be wanted).

        Raises:
            DisagreeError: They do not, in this time, or a VFIO group that is published is of no
                use to a virtual machine.
        """
        request = {"rules": RULES, "seconds": _SECONDS, **wanted}
        ask = f"cat >{_JUDGE}/in; cat {_JUDGE}/out"
        asked = json.dumps(request).encode()
        out = self.guest.run("/bin/sh", "-c", ask, stdin=asked, seconds=2 * _SECONDS).out
        answer: Json = json.loads(out)
        if not answer["agreed"]:
            shown = {key: answer.get(key) for key in ("specs", "expected", "functions")}
            text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in shown.items())
            raise DisagreeError(f"{answer['why']} (wanted: {wanted})\n{text}\n{self.journal()}")
        agreed = Agreed(**{field.name: answer[field.name] for field in dataclasses.fields(Agreed)})
        unusable = {group: how for group, how in agreed.usable.items() if how != USABLE}
        if unusable:
            raise DisagreeError(f"published on VFIO, and not usable: {unusable}")
        return agreed

    def saw(self) -> list[Json]:
        """All that the witness has noted; it must still be watching."""
        self.guest.run("systemctl", "is-active", _WITNESS)
        return [json.loads(line) for line in self.guest.read(_SAW).splitlines()]

    def faults(self) -> list[Json]:
        """What no reader may ever see, and the witness saw."""
        return [note for note in self.saw() if "fault" in note]

    def journal(self, *matches: str) -> str:
        """The agent's journal as text."""
        wanted = ("--unit", AGENT, "--no-pager", "--output=short-monotonic", *matches)
        return self.guest.run("journalctl", *wanted).out

    def entries(self, *matches: str) -> list[Json]:
        """What journald finds in the agent's journal by fields, `NAME=value` each."""
        wanted = ("--unit", AGENT, "--no-pager", "--output=json", *matches)
        return [json.loads(line) for line in self.guest.run("journalctl", *wanted).out.splitlines()]

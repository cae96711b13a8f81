"""The name of every log entry, with its level and meaning: what people may search for.

A name is stable: in the journal it is the field ``CDI_AGENT_EVENT``, in JSON the key ``event``. The
packages below this one cannot import it and write the name at the call; a test reads their calls
and compares. ``level`` is the highest at which an entry is written.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

EventLevel = Literal["debug", "info", "warning", "error"]


class Event(msgspec.Struct, frozen=True):
    """One row of the guide's table."""

    level: EventLevel
    meaning: str


EVENTS: Final[Mapping[str, Event]] = {
    "started": Event("info", "The service begins; nothing has been looked at yet."),
    "ready": Event(
        "info",
        "The first passes are done: what waits for the specs may start. "
        "Again after a reload that was taken.",
    ),
    "stopping": Event(
        "info", "A signal asked for the end; the pass that is under way is finished."
    ),
    "stopped": Event(
        "info", "The orderly end. The spec files stay unless `cdi.remove_on_stop` says otherwise."
    ),
    "ended": Event(
        "error", "The service cannot go on; `problem` says why, and the exit code is its kind."
    ),
    "crashed": Event(
        "error", "A bug ended the service, with its traceback. systemd starts it again."
    ),
    "no-lock": Event(
        "warning",
        "The state directory cannot be written, or `.cdi-agent.lock` in a spec directory is no"
        " lock of ours: nothing keeps a second instance away.",
    ),
    "reloaded": Event("info", "A new configuration is in force."),
    "reload-refused": Event("error", "The new configuration is wrong; the old one stays in force."),
    "restart-needed": Event("warning", "Keys were changed that are read only at the start."),
    "pass": Event(
        "info",
        "One pass of the reconciler: why, what it changed, how long it took. At debug if it "
        "changed nothing on disk.",
    ),
    "look-failed": Event(
        "error", "The host could not be looked at; it is tried again with growing delay."
    ),
    "spec-write-failed": Event(
        "error", "A spec file could not be written; it is tried again with growing delay."
    ),
    "spec-delete-failed": Event(
        "error", "A spec file could not be deleted; it is tried again with growing delay."
    ),
    "withheld": Event(
        "info", "A device is not published, and why. At debug where somebody chose that."
    ),
    "published-without-udev": Event(
        "warning", "A device was published though udev has not dealt with its nodes in time."
    ),
    "function-unreadable": Event(
        "warning", "A PCI function could not be read; the others are not affected."
    ),
    "static-dev": Event(
        "warning", "/dev is not the kernel's own: nodes in it neither come nor go."
    ),
    "udev-absent": Event(
        "warning", "There is no udevd: nodes are published without waiting for it."
    ),
    "udev-present": Event("info", "There is a udevd (again)."),
    "foreign-definition": Event(
        "warning",
        "A file of others, in another CDI directory, defines a device that is published here.",
    ),
    "foreign-uncovered": Event(
        "warning", "A device was withdrawn, and a file of others that defines it is in force now."
    ),
    "foreign-unreadable": Event(
        "info",
        "What others define is not known: a file that engines cannot read either, a directory that "
        "cannot be read, or too many files.",
    ),
    "spec-file-changed": Event(
        "warning", "Somebody changed a spec file of ours; it is written anew."
    ),
    "spec-file-unreadable": Event(
        "warning", "A spec file of ours cannot be read; it is written anew."
    ),
    "spec-file-recognised": Event(
        "info", "A spec file was taken for ours by its first line: the record was lost."
    ),
    "spec-directory-missing": Event(
        "error",
        "The directory for spec files could not be made; the first publication tries again.",
    ),
    "spec-watch-unavailable": Event(
        "warning",
        "A directory of specs cannot be watched: what others change there is found by looking "
        "regularly. Said once.",
    ),
    "spec-record-unusable": Event(
        "error", "The record of our spec files cannot be read; it is set aside for a new one."
    ),
    "spec-record-unwritable": Event(
        "error", "The record of our spec files cannot be written; said once until it can."
    ),
    "write-hung": Event(
        "error",
        "A write to a device did not come back in time. Nothing else is written to it until it "
        "does; everything else goes on.",
    ),
    "write-returned": Event("warning", "A write that had hung has come back after all."),
    "child-failed": Event(
        "error", "A child of the agent ended without an answer; `said` is its last word. A bug."
    ),
    "override-unknown": Event(
        "warning",
        "A device's `driver_override` could not be read in time, so the device is not moved.",
    ),
    "config-unknown": Event(
        "warning",
        "A device's configuration space could not be read in time, so it is not known whether the "
        "device still answers.",
    ),
    "holders-unknown": Event(
        "warning",
        "Not every process could be asked whether it holds a node open; `problem` says why.",
    ),
    "source-up": Event("info", "A source of events hears (again)."),
    "source-deaf": Event(
        "warning",
        "A source is open and hears nothing: udevd is missing, or this is another network "
        "namespace.",
    ),
    "source-down": Event(
        "warning", "A source's socket is gone; it is opened again with growing delay."
    ),
    "source-unavailable": Event(
        "warning", "A source cannot be had in this process; the agent looks regularly instead."
    ),
    "source-overflow": Event(
        "warning",
        "The kernel dropped messages because they came too fast; everything is looked at.",
    ),
    "source-malformed": Event("warning", "A message could not be read; everything is looked at."),
    "receive-buffer-refused": Event(
        "info", "`host.receive_buffer` is more than this process may have; libudev's choice stays."
    ),
    "listening": Event("info", "The port or socket of `service` is open at `address`."),
    "not-listening": Event(
        "warning",
        "The port or socket of `service` cannot be opened (taken, or not allowed). It is tried "
        "again with growing delay; everything else goes on.",
    ),
    "page-failed": Event(
        "error", "A page of the metrics port could not be made, with the traceback; a bug."
    ),
    "notify-failed": Event(
        "warning", "systemd could not be told something; said once until it works again."
    ),
    "notify-unsupported": Event(
        "warning", "NOTIFY_SOCKET has a form that is not understood; systemd is told nothing."
    ),
    "library-message": Event(
        "error", "A library, or Python itself, had something to say; `logger` names it."
    ),
    "order": Event(
        "info",
        "Somebody asked for something over the control socket: `client`. "
        "`dry_run` if only whether it could be.",
    ),
    "order-refused": Event("info", "What was asked for could not be done, and why."),
    "claim": Event("info", "A claim has come further: its `phase`, and what it waits for."),
    "claim-ended": Event(
        "warning", "A claim is no more, and how it ended; at info if that was as it should be."
    ),
    "claim-void": Event("info", "A claim of an earlier boot, which the reboot has ended."),
    "stranded": Event(
        "error", "A device could not be brought back to the driver that it came from."
    ),
    "journal-failed": Event("error", "The journal of claims could not be written."),
    "journal-unusable": Event(
        "error", "The journal of claims could not be read; it is kept, and nothing is guessed."
    ),
    "no-claims": Event(
        "error", "Nothing can be claimed on this host, and why; specs are kept true all the same."
    ),
    "not-assigned": Event(
        "error",
        "What `vfio.assign` says could not be claimed; it is tried again unless `gives_up` says"
        " that moving it has failed too often, until the configuration is read again.",
    ),
    "paused": Event(
        "warning",
        "No claim begins to move a device until `resume`, or until the service is started again.",
    ),
    "resumed": Event("warning", "Claims may move devices again."),
}

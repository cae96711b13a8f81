"""The agent on a kernel that nobody here wrote: a QEMU guest with Debian's kernel and systemd.

What happens once, and what for every scenario:

    image      Debian's packages become a kernel, a tiny initrd and a root file system   (image)
    installed  that root boots, and gets the agent's wheel and units as a user would      (layers)
    frozen     the installed root boots with one topology, and is frozen when at rest     (layers)
    scenario   a frozen guest is resumed on an overlay of its own, used and thrown away   (rig)

The first three are kept in a cache outside the repository, each under a key that is the hash of
all that went into it, so they are made again exactly when they must be.

Everything here runs on the host, except `inside/`, which is copied into the guest: standard
library only there, and never an import of the agent, so that what it says is independent.
"""

#!/usr/bin/python3
"""Holds a PCI function as a virtual machine's launcher does, until it is killed.

    launcher.py GROUP ADDRESS       prints `running` when it has the device

Opens the container, puts the group into it and takes the function's own descriptor: from then on
the kernel does not let the function leave vfio-pci (linux/vfio.h).
"""

import fcntl
import os
import struct
import sys
import time

VFIO_SET_IOMMU = 0x3B66  # _IO(';', 100 + 2)
VFIO_GROUP_SET_CONTAINER = 0x3B68
VFIO_GROUP_GET_DEVICE_FD = 0x3B6A
VFIO_TYPE1_IOMMU = 1


def main() -> None:
    number, address = sys.argv[1:]
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    group = os.open(f"/dev/vfio/{number}", os.O_RDWR)
    fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, struct.pack("i", container))
    fcntl.ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1_IOMMU)
    # Python's ioctl gives a buffer back instead of the descriptor, which is open all the same.
    fcntl.ioctl(group, VFIO_GROUP_GET_DEVICE_FD, address.encode() + b"\0")
    print("running", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()

"""What this host has: PCI functions and their nodes, read from /sys and /dev, and the news."""

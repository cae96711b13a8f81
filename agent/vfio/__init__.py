"""Who drives a device: claims, and the moves between a device's own driver and VFIO."""

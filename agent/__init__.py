"""Keeps a GPU host's CDI specs true, and moves its GPUs to VFIO and back.

The packages form layers; imports go down only, and `make check` holds them to it:

    cli > daemon | simulate > config > control | observe > reconcile > vfio | cdi > host > errors

This module holds nothing but the version, and pyproject.toml takes it from here: asking the
installed package for it would import some 30 ms more at each start.
"""

__version__ = "0.1.0"

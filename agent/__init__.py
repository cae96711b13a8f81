"""Keeps a GPU host's CDI specs true, and moves its GPUs to VFIO and back.

The packages form layers; imports go down only, and `make check` holds them to it:

    cli > daemon | simulate > config > control | observe > reconcile > vfio | cdi > host > errors

This module holds nothing but the version: whoever imports one part pays for that part only.
"""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: importlib.metadata takes long to import."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - see above

        return version("cdi-agent")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

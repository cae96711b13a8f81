"""What a child is to do: its arguments or, if it has none, what is told over its input.

So a child can be started before it is known what it is wanted for (`agent.vfio.spares`): it reads
its input to the end, NULs between the arguments. If nothing came it was not wanted, or its agent
has died, and it ends without having done anything. The standard library alone, as all that a child
imports.
"""

import os


def given(arguments: list[str]) -> list[str]:
    """The arguments, wherever they come from.

    Raises:
        SystemExit: None came; that is no error.
    """
    if arguments:
        return arguments
    os.closerange(3, 1 << 20)
    text = b""
    while part := os.read(0, 65_536):
        text += part
    if not text:
        raise SystemExit
    return [os.fsdecode(each) for each in text.split(b"\0")]

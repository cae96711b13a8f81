"""``python -m agent`` is ``cdi-agent``."""

from agent.cli import main

main()

"""How one talks to the agent: HTTP on a port or a socket, bounded in every direction.

This package knows nothing of what it serves: the daemon hands it pages as functions.
"""

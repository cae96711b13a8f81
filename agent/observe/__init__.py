"""How the agent is watched: log, metrics, health, and what systemd is told.

Reads counters, reports and snapshots; changes nothing, and nothing waits for it.
"""

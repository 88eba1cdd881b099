"""``discover --watch`` on a terminal: devices, their readings over time, and what happened."""

"""Discovery: which accelerators this machine has, what is true about them, and what changed.

Read in this order: ``gate`` (what can be ruled out without loading anything), ``probe`` and ``probe_child`` (one
child process per backend), ``examine`` and ``contact`` (what it does there), ``verify`` (read-back), ``assemble`` (a
probe's answer as records and a report), ``signature`` and ``remembered`` (why most probes need not open a driver),
``merge`` (one record per physical device), ``registry`` (what is remembered), ``events`` (what changed), ``service``
(all of it together).
"""

"""A host's devices as files: recorded on one machine, discovered again on any other.

:func:`~gpurt.recording.record.record` copies what discovery reads into a directory,
:func:`~gpurt.recording.replay.replay` runs discovery over it. Nothing is imported here: both are commands that most
runs of discovery never need.
"""

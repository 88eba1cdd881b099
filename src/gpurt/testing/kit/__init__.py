"""The groups of :class:`gpurt.testing.BackendConformance`, one topic a module."""

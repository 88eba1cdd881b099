"""Adapters to systems that embed gpurt. Each imports the system's own types only where it is given some."""

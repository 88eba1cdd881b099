"""The registry file: how it is read and written, and the part of it that holds measurements of this host."""

"""What is refused for the cluster's security. ::

ClusterError
├── InsecureEndpoint     an address that others can reach, without certificates
└── CredentialsRefused   a key, a certificate or the folder of a cluster that cannot be used
"""

from __future__ import annotations

from gpurt.cluster.errors import ClusterError


class InsecureEndpoint(ClusterError):
    """Whoever reaches the address could read and write everything, and nobody has said that this is wanted."""


class CredentialsRefused(ClusterError):
    """A key or a certificate is missing, expired, readable by others, of another name, or exists already."""

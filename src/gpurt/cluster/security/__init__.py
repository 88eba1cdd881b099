"""Who may join a cluster, and what each may say.

A cluster has a small certificate authority of its own (``gpurt cluster init``), and each participant a certificate from
it (``gpurt cluster enrol``). The common name of a node's certificate is the node's name, and the hub lets nobody write
under another name. Without certificates a bus is for one machine: see :mod:`gpurt.cluster.security.loopback`.
"""

"""The cluster layer: nodes tell what they have, a master keeps the picture.

Import from the modules: ``bus`` (the contract of an engine), ``inprocess`` and ``zenoh_engine`` (engines),
``publisher`` and ``worker`` (a node's side), ``observer``, ``view`` and ``master`` (the other side). Nothing is
imported here, so that a worker without the ``cluster`` extra can still load what it needs.
"""

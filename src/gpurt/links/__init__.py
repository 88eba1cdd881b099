"""Links between devices: what lies between them, and how fast bytes go there. Measured on demand, kept as topology.

::

    from gpurt.links import measure_links

    for link in await measure_links(backend):
        print(link.src_device_id, link.dst_device_id, link.link_type, link.bandwidth_gbps, link.latency_us)
"""

from gpurt.links.keep import keep_links, kept_links
from gpurt.links.measure import measure_link, measure_links
from gpurt.registry.records import Link, LinkType

__all__ = ["Link", "LinkType", "keep_links", "kept_links", "measure_link", "measure_links"]

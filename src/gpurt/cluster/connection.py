"""What happens to a connection in the ordinary course of things: it is waited for, made, and made again. Nothing to be
warned of, but for whoever has started a node to see: the address may be one at which there will never be a hub."""

from __future__ import annotations

import logging
from typing import Final

CONNECTION_LOG: Final = "gpurt.cluster.connection"
"""At INFO; the commands show it as plain lines."""

connection_log = logging.getLogger(CONNECTION_LOG)

"""The logger ``scatterpar``: what an engine decides, if it is no reason for a warning.

::

    logging.basicConfig()
    logging.getLogger("scatterpar").setLevel(logging.DEBUG)

It is silent until the program sets logging up. A plain step logs nothing.

    info    copies between two devices checked, a graph captured, or why none is,
            ranks that have met
    debug   each check before a step, each try of ``accum="auto"``
"""

from __future__ import annotations

import logging

logger = logging.getLogger("scatterpar")
logger.addHandler(logging.NullHandler())

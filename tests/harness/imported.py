"""What the server of ``faults.processes`` imports once, and a fork of it then has."""

import gc

import torch._dynamo  # noqa: F401  an optimizer imports it
from faults import places, state  # noqa: F401

import scatterpar  # noqa: F401

gc.collect()
# a collection would write to every object, and so copy its page in every fork
gc.freeze()

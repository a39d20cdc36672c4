"""What the server that ranks are forked from imports, so that each launch need not."""

import importlib

import transformers

from families import family
from families.family import families

for _family in families().values():
    if _family.kind != "plain":
        family.model(_family.name)
importlib.import_module("transformers.optimization")
assert transformers

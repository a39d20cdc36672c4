"""The files of users' own techniques as modules of one package, found by name in any process.

What a technique starts in a fresh interpreter, as ``torch.multiprocessing.spawn`` and a DataLoader may, has
nothing of Saturn loaded when it looks for a function or a class of the technique's file.
"""

import os

__path__ = [part for part in os.environ.get("SATURN_TECHNIQUES_FOLDER", "").split(os.pathsep) if part]

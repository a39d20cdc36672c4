"""Import this first where Saturn may not be installed: it is found beside this folder then."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

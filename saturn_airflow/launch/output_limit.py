"""What a run prints may fill no disk: of more than so much its end stays, in two files."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from saturn_airflow.model import sizes

#: Bytes at which the file is begun anew; what it held then is beside it until the next time.
MOST = 256 << 20
EARLIER = "output-earlier.log"


class OutputLimit:
    """Of the file ``output``, to which a run's processes append what they print."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._told = False

    def look(self) -> str | None:
        """Begin the file anew where it has become too large.

        :returns: the first time that it was, a sentence for people; else None.
        """
        with suppress(OSError):
            if self._output.stat().st_size < MOST:
                return None
            earlier = self._output.with_name(EARLIER)
            try:
                # It can't be given another name: those who print have it open.
                shutil.copyfile(self._output, earlier)
            except OSError:  # such as on a full disk, which needs the room
                earlier.unlink(missing_ok=True)
            os.truncate(self._output, 0)
            if not self._told:
                self._told = True
                return (
                    f"the job has printed {sizes.shown(MOST)}, which {earlier} has now: from here on the "
                    f"last of what it prints is kept, there and in {self._output.name}"
                )
        return None

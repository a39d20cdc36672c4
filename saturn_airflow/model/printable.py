"""Text of others, such as what jobs print or MLflow says, on its way to a log or a terminal."""

from __future__ import annotations

import re

# What colours text and moves the cursor, whole commands to terminals (titles, the clipboard), and single
# control characters; tabs and line breaks stay. ECMA-48, sections 5.4 and 5.6.
_COMMANDS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
)
_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^/\s]*@", re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """``text`` without what would tell a terminal to do something; a lone control character becomes ``�``."""
    return text if text.isprintable() else _CONTROLS.sub("�", _COMMANDS.sub("", text))


def one_line(text: str) -> str:
    """``text``, as :func:`printable` has it, in a single line: nothing in it can pass for another entry."""
    return " ".join(printable(text).split("\n"))


def in_short(reason: str) -> str:
    """``reason`` without the traceback in it: what stands before it, else what was raised, its last line."""
    said, _, raised = reason.strip().partition("Traceback (most recent call last):\n")
    return said.strip() or raised.rpartition("\n")[2]


def without_login(text: str) -> str:
    """``text`` with the addresses in it as people may see them: ``https://ann:secret@host`` is ``https://host``."""
    return _LOGIN.sub(r"\1", text)

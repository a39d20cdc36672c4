"""Has the name of a module of Python's, as a user's module may; nothing of ours may import it."""

raise RuntimeError("a user's module hides one of Python's")

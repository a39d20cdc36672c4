"""A mistake: the file does not import."""

import a_module_that_is_not_there  # noqa: F401

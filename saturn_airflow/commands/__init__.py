"""The subcommands of ``saturn``, one module each."""

"""The subcommands of ``saturn``, one module each.

Each has ``add(parser)``, which declares its arguments, and ``run(args)``, which returns the exit status and
raises :class:`~saturn_airflow.model.errors.SaturnError` for what the user can mend.
"""

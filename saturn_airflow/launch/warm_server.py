"""Importing this module warms a process up; only the server that others are forked from does."""

from saturn_airflow.launch import warm

warm.import_all()

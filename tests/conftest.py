"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile

# Importing Airflow writes a configuration into its home.
os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="saturn-tests-airflow-")

"""What shows in the Airflow UI."""

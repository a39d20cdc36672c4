"""What a sweep does next, decided from plain data: no Airflow, no MLflow, nothing started or stopped."""

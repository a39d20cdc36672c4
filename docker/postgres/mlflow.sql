-- Beside Airflow's own database, which the image makes from POSTGRES_DB.
CREATE DATABASE mlflow;

"""The Airflow tasks of a sweep. Thin: they read the context, call other packages, and push XComs."""

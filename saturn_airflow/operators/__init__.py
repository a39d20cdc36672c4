"""The Airflow tasks of a sweep. Thin: they read the context, call the rooms, and push XComs."""

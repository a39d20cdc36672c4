"""A deployment of several services: the compose file, the services as local processes, the checks."""

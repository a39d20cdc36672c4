"""A mistake: two techniques in one file."""

from saturn_airflow import BaseTechnique


class One(BaseTechnique):
    pass


class Two(BaseTechnique):
    pass

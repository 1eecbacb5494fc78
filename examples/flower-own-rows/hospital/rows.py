"""Rows of a site from its database, instead of a file."""

import os
import sqlite3

import pandas as pd

from fald.federation.engines.flower.app import make_client_app
from fald.problem.data import FederatedData
from fald.study.schema import Study


def load(study: Study) -> FederatedData:
    """Read the study's columns from the table ``patients`` of the database that HOSPITAL_DB names."""
    with sqlite3.connect(os.environ["HOSPITAL_DB"]) as database:
        patients = pd.read_sql_query("SELECT * FROM patients", database)
    return study.read_frame(patients, "patients")  # checked and encoded as the study says


client_app = make_client_app(load)

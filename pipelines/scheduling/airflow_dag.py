"""Airflow 3: one run every night. 5 and 7 are tried again and go on where they were; other codes want a person."""

import subprocess
from datetime import datetime, timedelta

from airflow.exceptions import AirflowException, AirflowFailException
from airflow.sdk import DAG, task

OCH = "/opt/och/bin/och run /etc/och/nightly.toml --set inbox=/srv/och/inbox --set dir=/srv/och/nightly --json"

with DAG("och_nightly", schedule="15 2 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1):

    @task(retries=5, retry_delay=timedelta(minutes=10))
    def nightly() -> None:
        code = subprocess.run(OCH.split()).returncode
        if code:
            raise (AirflowException if code in (5, 7) else AirflowFailException)(f"och ended with {code}")

    nightly()

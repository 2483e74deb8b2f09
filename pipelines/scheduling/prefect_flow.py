"""Prefect 3: python prefect_flow.py serves one run every night. 5 and 7 are tried again; other codes want a person."""

import subprocess

from prefect import flow, task

OCH = "/opt/och/bin/och run /etc/och/nightly.toml --set inbox=/srv/och/inbox --set dir=/srv/och/nightly --json"


def again(task, run, state) -> bool:
    return state.result(raise_on_failure=False).returncode in (5, 7)


@task(retries=5, retry_delay_seconds=600, retry_condition_fn=again)
def nightly() -> None:
    subprocess.run(OCH.split(), check=True)


@flow
def och_nightly() -> None:
    nightly()


if __name__ == "__main__":
    och_nightly.serve(name="och-nightly", cron="15 2 * * *", limit=1)

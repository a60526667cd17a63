"""Where a job's MetaServer is, and with which keys it is reached: looked up anew for every connection."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncline.errors import SynclineError
from syncline.meta import address
from syncline.meta.keys import JobKeys
from syncline.meta.rundir import ENDPOINT_VARIABLE, JobDir, check_job_name, job_token, run_root

if TYPE_CHECKING:
    from pathlib import Path

    from syncline.meta.locks import FileLock


@dataclass(frozen=True, slots=True)
class Found:
    """An endpoint and the job's keys."""

    endpoint: str
    keys: JobKeys


class Discovery:
    """Looks for the MetaServer of ``job``: in the environment, then in the run directory.

    While open it keeps this host's run directory of the job, if there is one, from being cleaned.
    """

    def __init__(self, job: str, root: Path | None = None) -> None:
        self.job = check_job_name(job)
        self._root = root
        self._lock: FileLock | None = None

    @property
    def place(self) -> str:
        """Where an endpoint is looked for, in words."""
        return f"{(self._root or run_root()) / self.job / 'endpoint.json'}, or {ENDPOINT_VARIABLE}"

    def look(self) -> Found | None:
        """Return what is known now; None while there is no server to be found.

        Raises:
            AuthError: no token, or a run directory that is not safely ours.
            SynclineError: a run directory that cannot be read.
        """
        try:
            return self._look()
        except OSError as error:
            raise SynclineError(
                f"the run directory of job {self.job!r} cannot be read", found=error
            ) from error

    def _look(self) -> Found | None:
        directory = self._directory()
        if given := os.environ.get(ENDPOINT_VARIABLE):
            address.parse(given)
            return Found(given, JobKeys.derive(job_token(directory), self.job))
        record = directory.endpoint_record() if directory else None
        if directory is None or record is None:
            return None
        return Found(record.endpoint, JobKeys.derive(directory.token(), self.job))

    def moved(self, endpoint: str) -> bool:
        """Whether the run directory names another endpoint by now; raises as `look`."""
        found = self.look()
        return found is not None and found.endpoint != endpoint

    def close(self) -> None:
        """Let go of the run directory."""
        if self._lock is not None:
            self._lock.release()

    def _directory(self) -> JobDir | None:
        try:
            directory = JobDir.open(self.job, self._root)
            if self._lock is None:
                self._lock = directory.join()
        except FileNotFoundError:
            return None
        return directory

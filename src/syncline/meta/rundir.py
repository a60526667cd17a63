"""The run directory of a job: its key, its MetaServer's address, its sockets, and who is alive.

``$SYNCLINE_RUN_DIR``, or ``$XDG_RUNTIME_DIR/syncline``, or ``/tmp/syncline-<uid>``; in it one directory a
job, mode 0700::

    token          the job's key, mode 0600 (unless SYNCLINE_JOB_TOKEN is set)
    endpoint.json  where the MetaServer listens, its boot number and process id
    state.json     counters that must only grow: boot, and each table's epoch; and the last port
    server.lock    flock held by the live MetaServer
    members.lock   flock shared by every client of this host
    sockets/       sockets, each named <stem>.<name>; <stem>.lock is held by the process that owns them

Nothing here is trusted for its presence: a lock is held or it is not.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from syncline.errors import AuthError, DeadlineError, ProtocolError, SynclineError
from syncline.faults import point
from syncline.meta import address
from syncline.meta.files import check_directory, read_small, replace_durably, write_durably
from syncline.meta.locks import FileLock
from syncline.meta.sockets import SocketHold, sweep_sockets

TOKEN_VARIABLE, ENDPOINT_VARIABLE = "SYNCLINE_JOB_TOKEN", "SYNCLINE_META_ENDPOINT"
_ROOT_VARIABLE = "SYNCLINE_RUN_DIR"
_JOB_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_LOCK_PATIENCE = 0.5
_Record = TypeVar("_Record", bound=msgspec.Struct)


class EndpointRecord(msgspec.Struct, frozen=True):
    """What ``endpoint.json`` says: where the MetaServer listens, which boot it is, which process."""

    endpoint: str
    boot: int
    pid: int
    host: str


class ServerState(msgspec.Struct, frozen=True):
    """What outlives a MetaServer: numbers that must never be given twice, and the port to come back to."""

    boot: int = 0
    epochs: dict[str, int] = {}
    port: int = 0


def run_root() -> Path:
    """Return the directory that holds this user's jobs; it need not exist yet."""
    if given := os.environ.get(_ROOT_VARIABLE):
        return Path(given)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "syncline"
    return Path(f"/tmp/syncline-{os.geteuid()}")  # noqa: S108 - owner and mode are checked before any use


def check_job_name(job: str) -> str:
    """Return ``job`` if it can name a directory.

    Raises:
        ProtocolError: it cannot.
    """
    if _JOB_NAME.fullmatch(job) is None:
        raise ProtocolError(
            "not a job name",
            expected="1 to 64 of A-Z a-z 0-9 . _ -, not beginning with a dot",
            found=repr(job),
        )
    return job


@dataclass(frozen=True, slots=True)
class JobDir:
    """One job's run directory, checked for owner and mode when opened.

    `create` makes what is missing, `open` wants it there. ``path`` is ``<root>/<job>``.
    """

    job: str
    path: Path

    @classmethod
    def create(cls, job: str, root: Path | None = None) -> JobDir:
        """Return the job's directory, made with a fresh token where there is none.

        Raises:
            AuthError: the directory or its parent is not safely ours.
            ProtocolError: not a job name.
        """
        check_job_name(job)
        root = root or run_root()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_directory(root)
        self = cls(job, root / job)
        for directory in (self.path, self.sockets):
            directory.mkdir(mode=0o700, exist_ok=True)
            check_directory(directory)
        if not os.environ.get(TOKEN_VARIABLE):
            self._make_token()
        return self

    @classmethod
    def open(cls, job: str, root: Path | None = None) -> JobDir:
        """Return the job's directory.

        Raises:
            AuthError: it is not safely ours.
            FileNotFoundError: there is none on this host.
        """
        root = root or run_root()
        self = cls(check_job_name(job), root / job)
        for directory in (root, self.path):
            check_directory(directory)
        return self

    @property
    def sockets(self) -> Path:
        """The directory of the job's Unix sockets."""
        return self.path / "sockets"

    # -- the key -------------------------------------------------------------------------------------------

    def token(self) -> bytes:
        """Return the job's token: ``SYNCLINE_JOB_TOKEN``, or what the token file holds.

        Raises:
            AuthError: there is none, or its file can be read by others.
        """
        return job_token(self)

    def _make_token(self) -> None:
        final = self.path / "token"
        if final.exists():
            return
        draft = self.path / f".token.{secrets.token_hex(8)}"
        write_durably(draft, secrets.token_hex(32).encode())
        try:
            os.link(draft, final)  # appears whole or not at all, and never replaces one
        except FileExistsError:
            return  # another process of the job was first: its token is the job's
        finally:
            draft.unlink()

    # -- the MetaServer ------------------------------------------------------------------------------------

    def claim_server(self) -> FileLock:
        """Return the lock that makes this process the job's MetaServer.

        Raises:
            ProtocolError: the job has a live one; the message names its process.
            FileNotFoundError: the directory was cleaned away meanwhile: create it again.
        """
        give_up = time.monotonic() + _LOCK_PATIENCE
        while (lock := FileLock.acquire(self.server_lock)) is None:
            if time.monotonic() >= give_up:
                holder = read_small(self.server_lock).decode(errors="replace").strip() or "unknown"
                raise ProtocolError(
                    f"job {self.job!r} already has a MetaServer",
                    expected="one MetaServer a job",
                    found=f"process {holder}",
                    hint="stop that one, or choose another job name",
                )
            time.sleep(0.02)  # a sweep or a clean looks at the lock for a moment
        lock.write(f"{os.getpid()}\n")
        return lock

    def publish_endpoint(self, endpoint: str, boot: int) -> None:
        """Write ``endpoint.json``; clients that wait for it find it whole."""
        record = EndpointRecord(endpoint, boot, os.getpid(), os.uname().nodename)
        replace_durably(self.path / "endpoint.json", msgspec.json.encode(record))

    def withdraw_endpoint(self) -> None:
        """Remove ``endpoint.json``: the MetaServer stopped in good order."""
        (self.path / "endpoint.json").unlink(missing_ok=True)

    def endpoint_record(self) -> EndpointRecord | None:
        """Return what ``endpoint.json`` says; None where no MetaServer has written one.

        Raises:
            SynclineError: the file is damaged.
        """
        return self._load("endpoint.json", EndpointRecord)

    def endpoint(self, deadline: float = 0.0) -> str:
        """Return where the job's MetaServer listens: ``SYNCLINE_META_ENDPOINT``, or the run directory's word.

        Args:
            deadline: seconds to wait for one to appear.

        Raises:
            DeadlineError: none appeared.
        """
        return find_endpoint(self.job, deadline, self.path.parent)

    def load_state(self) -> ServerState:
        """Return the persisted counters; zeros for a new job.

        Raises:
            SynclineError: the file is damaged: guessing would hand out numbers twice.
        """
        return self._load("state.json", ServerState) or ServerState()

    def store_state(self, state: ServerState) -> None:
        """Persist the counters: on disk when this returns."""
        point("meta.before_store_state")
        replace_durably(self.path / "state.json", msgspec.json.encode(state))

    def _load(self, name: str, kind: type[_Record]) -> _Record | None:
        path = self.path / name
        try:
            text = read_small(path)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise SynclineError(
                f"{path} is damaged",
                expected=kind.__name__,
                found=error,
                hint="`syncline clean` removes a dead job",
            ) from error

    # -- who is alive --------------------------------------------------------------------------------------

    @property
    def server_lock(self) -> Path:
        """The file whose lock the live MetaServer holds."""
        return self.path / "server.lock"

    @property
    def members_lock(self) -> Path:
        """The file whose lock every living member of this host shares."""
        return self.path / "members.lock"

    def join(self) -> FileLock:
        """Return this process's shared lock as a member, which keeps the directory from being cleaned.

        Raises:
            FileNotFoundError: the directory was cleaned away meanwhile.
            DeadlineError: somebody keeps the lock to himself.
        """
        give_up = time.monotonic() + _LOCK_PATIENCE
        while (lock := FileLock.acquire(self.members_lock, shared=True)) is None:
            if time.monotonic() >= give_up:
                raise DeadlineError(
                    f"{self.members_lock} stays locked", hint="is a `syncline clean` stopped half-way?"
                )
            time.sleep(0.01)  # a clean looks at it for a moment
        return lock

    def hold_sockets(self) -> SocketHold:
        """Return this process's right to sockets in the directory: they are swept once it dies.

        Raises:
            FileNotFoundError: the directory was cleaned away meanwhile.
        """
        with self.join():
            return SocketHold.take(self.sockets)

    def sweep(self) -> list[str]:
        """Remove the sockets and lock files of dead processes of this job; return their names.

        Only ``sockets/`` is touched.
        """
        if not self.sockets.exists():
            return []
        check_directory(self.sockets)
        return sweep_sockets(self.sockets)


def job_token(job_dir: JobDir | None) -> bytes:
    """Return the job's token: ``SYNCLINE_JOB_TOKEN``, or the file in ``job_dir``.

    Raises:
        AuthError: neither is there, or others can read the file.
    """
    if given := os.environ.get(TOKEN_VARIABLE):
        return given.strip().encode()
    hint = f"set {TOKEN_VARIABLE} as the job's other processes have it"
    if job_dir is None:
        raise AuthError("no job key", expected=f"{TOKEN_VARIABLE}, or the job's run directory", hint=hint)
    path = job_dir.path / "token"
    try:
        token = read_small(path, private=True).strip()
    except FileNotFoundError:
        raise AuthError(f"{path} is missing", expected="the job's token, mode 0600", hint=hint) from None
    return token


def find_endpoint(job: str, deadline: float = 0.0, root: Path | None = None) -> str:
    """Return the endpoint of the job's MetaServer, waiting ``deadline`` seconds for one to appear.

    Raises:
        DeadlineError: none appeared; the message says where it was looked for.
        AuthError: the run directory is not safely ours.
    """
    if given := os.environ.get(ENDPOINT_VARIABLE):
        address.parse(given)
        return given
    place = (root or run_root()) / check_job_name(job) / "endpoint.json"
    give_up = time.monotonic() + deadline
    while True:
        record = _record_if_any(job, root)
        if record is not None:
            return record.endpoint
        if time.monotonic() >= give_up:
            raise DeadlineError(
                f"job {job!r} has no MetaServer after {deadline:g} s",
                expected=f"{place}, or {ENDPOINT_VARIABLE}",
                found="neither",
                hint="start the trainer or `syncline serve` with the same job name and SYNCLINE_RUN_DIR",
            )
        time.sleep(min(0.02, max(0.0, give_up - time.monotonic())))


def _record_if_any(job: str, root: Path | None) -> EndpointRecord | None:
    try:
        return JobDir.open(job, root).endpoint_record()
    except FileNotFoundError:
        return None

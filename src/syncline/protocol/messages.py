"""Every request, reply and event of the control plane, as frozen typed structs.

The MetaServer and its clients exchange these as MessagePack; the struct's name is its tag. Payloads that the
protocol does not read (bindings, digests, manifests) travel as opaque bytes. Every ``deadline`` is in
seconds counted from the arrival of the request, since clocks of two processes differ. A request that was
answered, and is sent again because the answer was lost, is harmless and answered alike.
"""

from __future__ import annotations

from typing import get_args

from syncline.protocol.parts import (
    InstanceLayout,
    Level,
    Message,
    Mode,
    RankLayout,
    Source,
    Until,
    WriterSource,
)
from syncline.protocol.replies import (
    AllVerified,
    AppliedDone,
    Begun,
    BindingBlob,
    CommitSummary,
    Committed,
    Current,
    Decision,
    DigestBlobs,
    Done,
    Event,
    Events,
    InstanceStatus,
    ManifestBlob,
    Members,
    Pinned,
    Pull,
    Pulls,
    PutDone,
    Registered,
    Status,
    TableStatus,
    VersionStatus,
    WindowClosed,
)
from syncline.protocol.requests import (
    AbortVersion,
    Applied,
    AwaitBound,
    AwaitDecision,
    AwaitDirty,
    AwaitMembers,
    AwaitPulls,
    AwaitServing,
    AwaitUpdate,
    AwaitVerified,
    BeginUpdate,
    CloseWindow,
    Commit,
    Deregister,
    Digests,
    Failed,
    FetchDigests,
    GetBinding,
    GetManifest,
    Heartbeat,
    JoinFailed,
    Pin,
    Progress,
    Put,
    PutBinding,
    PutManifest,
    RegisterReader,
    RegisterWriter,
    StartUpdate,
    StatusQuery,
    Unpin,
    Verified,
    WaitCommitted,
    Watch,
)

__all__ = [
    "REPLIES",
    "REQUESTS",
    "AbortVersion",
    "AllVerified",
    "Applied",
    "AppliedDone",
    "AwaitBound",
    "AwaitDecision",
    "AwaitDirty",
    "AwaitMembers",
    "AwaitPulls",
    "AwaitServing",
    "AwaitUpdate",
    "AwaitVerified",
    "BeginUpdate",
    "Begun",
    "BindingBlob",
    "CloseWindow",
    "Commit",
    "CommitSummary",
    "Committed",
    "Current",
    "Decision",
    "Deregister",
    "DigestBlobs",
    "Digests",
    "Done",
    "Event",
    "Events",
    "Failed",
    "FetchDigests",
    "GetBinding",
    "GetManifest",
    "Heartbeat",
    "InstanceLayout",
    "InstanceStatus",
    "JoinFailed",
    "Level",
    "ManifestBlob",
    "Members",
    "Message",
    "Mode",
    "Pin",
    "Pinned",
    "Progress",
    "Pull",
    "Pulls",
    "Put",
    "PutBinding",
    "PutDone",
    "PutManifest",
    "RankLayout",
    "RegisterReader",
    "RegisterWriter",
    "Registered",
    "Reply",
    "Request",
    "Source",
    "StartUpdate",
    "Status",
    "StatusQuery",
    "TableStatus",
    "Unpin",
    "Until",
    "Verified",
    "VersionStatus",
    "WaitCommitted",
    "Watch",
    "WindowClosed",
    "WriterSource",
]

Request = (
    RegisterWriter
    | RegisterReader
    | JoinFailed
    | AwaitMembers
    | Heartbeat
    | Deregister
    | PutManifest
    | GetManifest
    | PutBinding
    | GetBinding
    | Put
    | Digests
    | FetchDigests
    | AbortVersion
    | CloseWindow
    | WaitCommitted
    | BeginUpdate
    | StartUpdate
    | AwaitUpdate
    | AwaitBound
    | AwaitDirty
    | AwaitVerified
    | AwaitDecision
    | AwaitPulls
    | Progress
    | Verified
    | Failed
    | Commit
    | Applied
    | AwaitServing
    | Pin
    | Unpin
    | StatusQuery
    | Watch
)

Reply = (
    Done
    | Registered
    | Members
    | ManifestBlob
    | BindingBlob
    | PutDone
    | DigestBlobs
    | WindowClosed
    | CommitSummary
    | Begun
    | Current
    | Decision
    | AllVerified
    | Pulls
    | Committed
    | AppliedDone
    | Pinned
    | Status
    | Events
)

REQUESTS: tuple[type[Message], ...] = get_args(Request)
REPLIES: tuple[type[Message], ...] = get_args(Reply)

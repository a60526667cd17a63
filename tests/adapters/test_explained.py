"""What ranks tell of their live tensors survives JSON."""

from __future__ import annotations

import json

from syncline.adapters.explained import Explained
from syncline.layout.box import Box
from syncline.store.adapter import LiveStatus, Status


def test_it_is_told_as_plain_values_and_read_again() -> None:
    status = {
        "embed": LiveStatus(Status.SYNCED, ("embed.weight",), "bfloat16", (8, 4)),
        "rope": LiveStatus(Status.LOCAL, (), "float32", (16,)),
    }
    holes = {"embed": [Box((6, 0), (2, 4))], "rope": [Box((0,), (16,))], "gone": [Box((0,), (1,))]}
    found = Explained.of(status, holes, {"direct": 1}, ["old.inv_freq"])
    assert found.own == {"embed": 8}, "a local tensor is the engine's own as a whole"
    assert Explained.from_plain(json.loads(json.dumps(found.plain()))) == found

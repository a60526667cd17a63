"""The learned layout against Transformers' own loader: every element carries its checkpoint coordinate."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from safetensors import safe_open

from syncline.adapters.live import LiveTensors
from syncline.adapters.modules import walk
from syncline.adapters.transformers_names import learn_names
from tests.adapters.helpers import CONFIGS, read, tiny


def _saved_shapes(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", CONFIGS)
def test_every_live_element_is_its_checkpoint_coordinate(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    shapes = _saved_shapes(tmp_path)
    probe, start = {}, 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        probe[name] = torch.arange(start, start + n, dtype=torch.float64).view(shape)
        start += n
    assert start < 2**24  # exact in the float32 that some modules insist on

    kind = type(tiny(family))
    loaded = kind.from_pretrained(
        None, config=copy.deepcopy(CONFIGS[family]), state_dict=dict(probe), dtype=torch.float64
    )
    tree = walk(loaded)
    names = learn_names(loaded, tree)
    live = LiveTensors(tree, names, "test")
    assert {name: source.shape for name, source in names.sources.items()} == shapes
    assert set(live.manifest.names) == set(shapes)
    found = read(live.manifest, live.addresses())
    for name, want in probe.items():
        np.testing.assert_array_equal(found[name], want.numpy(), err_msg=name)
    # the other direction: every parameter is reached, none but second names of tied ones is left over
    carried = {part.live for source in names.sources.values() for part in source.parts}
    left = set(tree.state) - carried
    assert left == ({"lm_head.weight"} if family == "qwen3_tied" else set())
    assert names.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if left else {})


def test_the_same_layout_before_and_after_loading(tmp_path):
    made = tiny("qwen3_moe")
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path, dtype=torch.float32)
    fingerprints = set()
    for model in (made, loaded):
        tree = walk(model)
        fingerprints.add(LiveTensors(tree, learn_names(model, tree), "test").manifest.fingerprint)
    assert len(fingerprints) == 1

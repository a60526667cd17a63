"""More toy loaders: those that compute, overwrite, rebind, repeat, or leave something out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.layout_loader.loaders import BF16, F32, FP8, Case, case, live, spec


@case
def rounded_twice() -> Case:
    """float32 to bfloat16 to float32: no single cast."""

    def load(p, weights):
        for _, w in weights:
            p["w"].data.copy_(w.to(BF16))

    return Case({"w": spec(3, 4, dtype=F32)}, live(w=(3, 4, F32)), load, replays={"w"})


@case
def minus_exp_in_place() -> Case:
    """Mamba's A_log: copied, then transformed where it stands."""

    def load(p, weights):
        for name, w in weights:
            p[name].data.copy_(w.narrow(0, 4, 4))
            if name == "a":
                p[name].data.copy_(-torch.exp(p[name].data.float()))
            elif name == "b":
                p[name].data.neg_().exp_()

    ck = {n: spec(8, dtype=F32) for n in "abc"}
    return Case(ck, live(a=(4, F32), b=(4, F32), c=(4, F32)), load, replays={"a", "b"}, writes=1)


@case
def in_place_on_a_part() -> Case:
    """Of a fused tensor, one region is transformed after everything was copied."""

    def load(p, weights):
        fused = p["fused"].data
        for name, w in weights:
            fused["qkv".index(name) * 4 :][:4].copy_(w)
        fused.view(3, 2, 2, 6)[1, 1].mul_(2)

    return Case({n: spec(4, 6) for n in "qkv"}, live(fused=(12, 6, BF16)), load, replays={"k"}, writes=3)


@case
def filled_from_a_scalar() -> Case:
    def load(p, weights):
        for name, w in weights:
            if name == "scale":
                p["scale"].data[1:].fill_(w.item())
                p["scale"].data[0] = w
            else:
                p["other"].data[:2] = w.item()

    ck = {"scale": spec(dtype=F32), "one": spec(1, dtype=BF16)}
    return Case(ck, live(scale=(3, F32), other=(4, F32)), load, replays={"scale", "one"}, holes=2, writes=1)


@case
def thread_pool() -> Case:
    """Weights given away to a pool, and one to a thread of its own."""

    def load(p, weights):
        def one(name, w):
            layer, kind = name.split(".")
            if kind == "a":
                p["a"].data[int(layer)].copy_(w.t())
            else:
                p["b"].data[int(layer)].copy_(torch.cat([w, w]))

        with ThreadPoolExecutor(max_workers=3) as pool:
            *listed, last = weights
            tasks = [pool.submit(one, name, w) for name, w in listed]
            for task in tasks:
                task.result()
        thread = threading.Thread(target=one, args=last)
        thread.start()
        thread.join()

    ck = {f"{i}.{k}": spec(4, 6) for i in range(8) for k in "ab"}
    return Case(ck, live(a=(8, 6, 4, BF16), b=(8, 8, 6, BF16)), load, writes=24)


@case
def rebinds_data() -> Case:
    """The loader replaces the memory under a parameter: adopted, transposed, and padded."""

    def load(p, weights):
        for name, w in weights:
            if name == "adopted":
                p[name].data = w
            elif name == "turned":
                p[name].data = torch.empty_like(w)
                p[name].data.copy_(w)
                p[name].data = p[name].data.t().contiguous()
            else:
                bigger = torch.zeros(6, 4, dtype=w.dtype, device=w.device)
                bigger[:4].copy_(w)
                p[name].data = bigger

    ck = {"adopted": spec(4, 6), "turned": spec(4, 6), "padded": spec(4, 4)}
    make = live(adopted=(4, 6, BF16), turned=(4, 6, BF16), padded=(4, 4, BF16))
    return Case(ck, make, load, writes=3)


@case
def ignores_a_name() -> Case:
    def load(p, weights):
        for name, w in weights:
            if "inv_freq" in name:
                continue
            if name == "looked_at":
                w.float().sum()
                continue
            p[name].data.copy_(w)

    ck = {"w": spec(3, 4), "rotary.inv_freq": spec(4, dtype=F32), "looked_at": spec(4)}
    return Case(ck, live(w=(3, 4, BF16)), load, unused={"rotary.inv_freq", "looked_at"}, writes=1)


@case
def overwrites_twice() -> Case:
    """Overlapping writes of several shapes: the last one of each element counts."""

    def load(p, weights):
        w = dict(weights)
        x = p["x"].data
        x.copy_(w["whole"])
        x[1:4, 2:5].copy_(w["corner"])
        x[:, 3] = w["column"]
        x[2] = w["row"]
        p["y"].data.copy_(w["whole"])
        p["y"].data.copy_(w["last"])

    ck = {
        "whole": spec(5, 6), "corner": spec(3, 3), "column": spec(5), "row": spec(6), "last": spec(5, 6)
    }  # fmt: skip
    return Case(ck, live(x=(5, 6, BF16), y=(5, 6, BF16)), load)


@case
def scales_weights() -> Case:
    """Per-tensor fp8: requantised to the larger of two scales, which is itself kept."""

    def load(p, weights):
        w = dict(weights)
        largest = torch.maximum(w["a.scale"], w["b.scale"])
        p["scale"].data.copy_(largest)
        for i, name in enumerate("ab"):
            p["w"].data[4 * i : 4 * i + 4].copy_(w[name].to(F32) * w[f"{name}.scale"] / largest)
        p["norm"].data.copy_(w["norm"] + 1)

    ck = {"a": spec(4, 6, dtype=FP8), "b": spec(4, 6, dtype=FP8), "norm": spec(6)}
    ck |= {f"{n}.scale": spec(1, dtype=F32) for n in "ab"}
    return Case(ck, live(w=(8, 6, BF16), scale=(1, F32), norm=(6, BF16)), load, replays=set(ck))


@case
def repeats() -> Case:
    """One KV head for four ranks' worth of heads, three ways; one scale for three shards."""

    def load(p, weights):
        for name, w in weights:
            if name == "kv":
                p["a"].data.copy_(w.view(2, 2, 4).repeat_interleave(3, dim=0).view(12, 4))
                p["b"].data.copy_(w.repeat(2, 1))
                p["c"].data.copy_(w.unsqueeze(0).expand(2, 4, 4).reshape(8, 4))
            else:
                p["scale"].data.copy_(w)

    ck = {"kv": spec(4, 4), "scale": spec(1, dtype=F32)}
    make = live(a=(12, 4, BF16), b=(8, 4, BF16), c=(8, 4, BF16), scale=(3, F32))
    return Case(ck, make, load)


@case
def gathers_rows() -> Case:
    """Rows in an order that the loader computes: replayed, since no stride says it."""

    def load(p, weights):
        for _, w in weights:
            order = torch.tensor([3, 0, 5, 1, 4, 2])
            p["w"].data.copy_(w[order.to(w.device) if w.device.type != "meta" else order])

    return Case({"w": spec(6, 4)}, live(w=(6, 4, BF16)), load, replays={"w"})


@case
def local_and_odd_shapes() -> Case:
    """A table that nobody loads, a scalar, an empty tensor, and columns of every other row."""

    def load(p, weights):
        for name, w in weights:
            target = p[name].data
            if name == "odd":
                target[1::2, 1:3] = w
            else:
                target.copy_(w)

    ck = {"scalar": spec(dtype=F32), "empty": spec(0, 4), "odd": spec(3, 2)}
    make = live(scalar=(F32,), empty=(0, 4, BF16), odd=(6, 4, BF16), table=(5, F32))
    return Case(ck, make, load, unused={"empty"}, holes=18 + 5, writes=2)

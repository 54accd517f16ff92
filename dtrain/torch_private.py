"""Every private torch name that dtrain uses, in one place. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as _symmetric  # defines torch.ops.symm_mem
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_python_sharding_prop_cache,
)
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtrain import rng

_c10d: Any = torch._C._distributed_c10d


def tracing_graph() -> Graph | None:
    """The graph that make_fx is recording right now, or None."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def join_fake_world(size: int, rank: int = 0) -> None:
    """A process group of any size without processes; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextmanager
def forgetting_meshes() -> Iterator[None]:
    """Empty DTensor's caches before and after. They hold meshes, and an equal mesh as another rank sees it
    has other groups."""
    _clear_caches()
    try:
        yield
    finally:
        _clear_caches()


def _clear_caches() -> None:
    _clear_python_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _clear_fast_path_sharding_prop_cache()  # type: ignore[no-untyped-call]


@functools.cache
def gloo() -> str:
    """The backend to ask for on CPUs: gloo with one thread a group. With the two that torch gives it, runs died now
    and then: core dumps show a block freed twice in a thread of gloo, with the name of a collective in it, which both
    threads seem to note as the last one ended, without a lock."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._threads, options._timeout = 1, timeout
        # As torch's own constructor, which takes no number of threads.
        names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
        options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend("gloo_one_thread", create, devices="cpu")
    return "gloo_one_thread"


def register_group(name: str, group: Any) -> None:
    """Let graphs say `name` for `group`; in a thread-isolated world the name belongs to the thread."""
    _c10d._register_process_group(name, group)


def unregister_group(name: str) -> None:
    _c10d._unregister_process_group(name)


def enable_symmetric_memory(name: str) -> None:
    """Let `torch.ops.symm_mem` use a registered group. Called by all of its ranks. Newer torch says that it is not
    needed any more, and still looks whether it was done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric.enable_symm_mem_for_group(name)  # type: ignore[arg-type]


@contextmanager
def isolated_threads() -> Iterator[None]:
    """While open, registered group names belong to the thread that registered them."""
    _c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _c10d._set_thread_isolation_mode(False)


def storage_key(x: Any) -> int:
    """The same number for tensors, fake ones too, that share memory, as long as one of them lives."""
    return int(x.untyped_storage()._cdata)


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use, None where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import

    try:
        return str(get_cpp_compiler())
    except Exception:  # InvalidCxxCompiler, which has moved between modules
        return None


def inductor_compile(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """One static-shape graph through Inductor, or out of its cache on disk. Its own reordering is off: it would put
    each wait right behind its collective."""
    from torch._inductor import config

    _lower_mix()
    with config.patch(reorder_for_locality=False, reorder_for_peak_memory=False):
        return torch._inductor.standalone_compile(graph, examples, dynamic_shapes="from_example_inputs")


@functools.cache
def _lower_mix() -> None:
    """Tell Inductor what `rng.mix` is: a pointwise function that reads its input once."""
    from torch._inductor.lowering import make_pointwise, register_lowering  # slow to import
    from torch._inductor.virtualized import ops

    def mix(z: Any) -> Any:
        number = functools.partial(ops.constant, dtype=torch.int64)
        for by, factor in rng.ROUNDS:
            shifted = ops.bitwise_right_shift(z, number(by))
            z = ops.bitwise_xor(z, ops.bitwise_and(shifted, number((1 << (64 - by)) - 1)))
            z = z if factor == 1 else ops.mul(z, number(factor))
        return z

    register_lowering(torch.ops.dtrain.mix.default, type_promotion_kind=None)(make_pointwise(mix))

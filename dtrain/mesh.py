"""Ranks, coordinates and groups: pure arithmetic, and the three worlds a program can live in.

- a *fake* world of any size, without processes, where programs are lowered;
- a *simulated* world, every rank a thread of this process, for tests and `dtrain verify`;
- the *real* one, over gloo or NCCL.

Groups are named, and graphs carry the names: `tp`; `dp.fsdp` (both dims at once); `tp%2` (blocks of two
neighbours along tp, which share a KV head); `pp@0+3` (the pipeline coordinates 0 and 3, for tied parameters);
`world`. Collectives of one group run in the order of their start. So what overlaps has a communicator of its own,
over the same ranks and named after its purpose: `fsdp/reduce` is for reductions of gradients, while `fsdp` gathers
parameters; `pp/act` and `pp/grad` are the two directions of a pipeline.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.torch_private import gloo, isolated_threads, join_fake_world, register_group, unregister_group

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh dims, outermost first: this order is the rank order (the last varies fastest)."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(d for d, _ in self.sizes)

    @property
    def world(self) -> int:
        n = 1
        for _, size in self.sizes:
            n *= size
        return n

    def size(self, dim: str) -> int:
        """Ranks along `dim`; 1 for a dim that the mesh does not have."""
        return dict(self.sizes).get(dim, 1)

    def product(self, dims: Iterable[str]) -> int:
        n = 1
        for d in dims:
            n *= self.size(d)
        return n

    def ordered(self, dims: Iterable[str]) -> tuple[str, ...]:
        """The given dims in mesh order, without those of size 1."""
        wanted = set(dims)
        return tuple(d for d, n in self.sizes if d in wanted and n > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each dim."""
        out: dict[str, int] = {}
        for dim, size in reversed(self.sizes):
            rank, out[dim] = divmod(rank, size)
        return out

    def rank(self, at: Mapping[str, int]) -> int:
        """The rank at the given coordinates (0 where not given)."""
        r = 0
        for dim, size in self.sizes:
            r = r * size + at.get(dim, 0)
        return r


def flat_index(mesh: Mesh, dims: Sequence[str], at: Mapping[str, int]) -> int:
    """The index along several dims at once, the first varying slowest."""
    i = 0
    for d in dims:
        i = i * mesh.size(d) + at.get(d, 0)
    return i


def base(name: str) -> str:
    """A group's name without its purpose: what says which ranks it has."""
    return name.partition("/")[0]


def for_reductions(name: str) -> str:
    """The communicator that REDUCE uses over the ranks of the group `name`."""
    return f"{name}/reduce"


def pipeline_groups(mesh: Mesh) -> tuple[str, ...]:
    """The communicators of SEND and RECV: activations go forward, gradients back."""
    return ("pp/act", "pp/grad") if mesh.size("pp") > 1 else ()


def group_ranks(mesh: Mesh, name: str, rank: int) -> tuple[int, ...]:
    """The members of the group `name` that `rank` belongs to, in order; empty if it belongs to none."""
    name = base(name)
    if name == "world":
        return tuple(range(mesh.world))
    at = mesh.coordinates(rank)
    if "@" in name:
        dim, places = name.split("@")
        members = [int(p) for p in places.split("+")]
        return tuple(mesh.rank({**at, dim: p}) for p in members) if at[dim] in members else ()
    if "%" in name:
        dim, block = name.split("%")
        first = at[dim] // int(block) * int(block)
        return tuple(mesh.rank({**at, dim: first + i}) for i in range(int(block)))
    dims = name.split(".")
    spans = [range(mesh.size(d)) for d in dims]
    return tuple(mesh.rank({**at, **dict(zip(dims, place, strict=True))}) for place in itertools.product(*spans))


def group_size(mesh: Mesh, name: str) -> int:
    """How many ranks the groups called `name` have."""
    if "@" in name:
        return len(base(name).split("@")[1].split("+"))
    return len(group_ranks(mesh, name, 0))


def all_groups(mesh: Mesh, name: str) -> list[tuple[int, ...]]:
    """Every group called `name`, each once."""
    return [g for g in dict.fromkeys(group_ranks(mesh, name, r) for r in range(mesh.world)) if g]


# --------------------------------------------------------------------------------------------- fake world


@contextmanager
def fake_mesh(mesh: Mesh, dims: tuple[str, ...], rank: int = 0) -> Iterator[DeviceMesh | None]:
    """A DeviceMesh of `dims` without processes, for tracing; None when there is no dim."""
    if not dims:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("programs are lowered before the process joins a world")
    shape = tuple(mesh.size(d) for d in dims)
    world = Mesh(tuple(zip(dims, shape, strict=True))).world
    join_fake_world(world, rank)
    try:
        yield DeviceMesh("cpu", torch.arange(world).view(shape), mesh_dim_names=dims)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------- simulated world


class _Meeting:
    """Where the threads of one group exchange tensors. `patience` is how many seconds a member waits."""

    def __init__(self, name: str, ranks: Sequence[int], abort: threading.Event, patience: float = 300.0) -> None:
        self.name, self.ranks, self.abort, self.patience = name, tuple(ranks), abort, patience
        self.members = len(ranks)
        self.ready = threading.Condition()
        self.gone: set[int] = set()  # members whose work has ended
        self.slots: dict[int, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.taken: dict[int, int] = {}

    def put(self, turn: int, index: int, value: Any, combine: Callable[[list[Any]], Any]) -> None:
        """A member's part of the group's collective number `turn`; the last one combines them all."""
        with self.ready:
            slot = self.slots.setdefault(turn, {})
            slot[index] = value
            if len(slot) == self.members:
                self.results[turn] = combine([slot[i] for i in range(self.members)])
                self.ready.notify_all()

    def take(self, turn: int) -> Any:
        """The result, once all have put their part."""
        with self.ready:
            self.wait_until(
                lambda: turn in self.results, lambda: {i for i in range(self.members) if i not in self.slots[turn]}
            )
            result = self.results[turn]
            self.taken[turn] = self.taken.get(turn, 0) + 1
            if self.taken[turn] == self.members:
                del self.slots[turn], self.results[turn], self.taken[turn]
            return result

    def wait_until(self, there: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        """Wait, holding `ready`; an error if a missing member will never come, or not before patience ends."""
        until = time.monotonic() + self.patience
        while not there():
            if self.abort.is_set():
                raise SimulationStoppedError
            left, gone = missing(), missing() & self.gone
            if gone:
                raise RuntimeError(f"member {min(gone)} of a group ended while others wait for it")
            if time.monotonic() > until:
                ranks = ", ".join(str(self.ranks[i]) for i in sorted(left))
                raise RuntimeError(
                    f"group {self.name}: waited {self.patience:g} s for rank {ranks}, which did not come"
                )
            self.ready.wait(timeout=1.0)

    def leave(self, index: int) -> None:
        with self.ready:
            self.gone.add(index)
            self.ready.notify_all()


class SimulationStoppedError(RuntimeError):
    """Another simulated rank failed; this one stops too."""


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Pending(dist.Work):
    """What is there when it has been waited for, and not before."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self.take = take

    def wait(self, timeout: Any = None) -> bool:
        self.take()
        return True


class SimulatedGroup(dist.ProcessGroup):
    """One rank's end of a process group whose members are threads. Reductions go in rank order. As on a device, a
    collective is started by its call and ended by the wait for it: until then its result is NaN (or the least
    integer).

    torch 2.11 and 2.13 call the gather and the reduce-scatter by different names; both are here.
    """

    def __init__(self, index: int, meeting: _Meeting, mail: dict[tuple[int, int, int], Tensor]) -> None:
        super().__init__(index, meeting.members)  # type: ignore[call-arg]
        self.index, self.meeting, self.mail = index, meeting, mail
        self.turn = 0
        self.messages: Counter[tuple[int, int]] = Counter()  # so far, by (from, to): they are matched in order

    def size(self) -> int:
        return self.meeting.members

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "simulated"

    def _start(
        self, outs: list[Tensor], ins: list[Tensor], combine: Callable[[list[Tensor]], Tensor], scatter: bool = False
    ) -> dist.Work:
        first = self.turn + 1
        for out, x in zip(outs, ins, strict=True):
            self.turn += 1
            self.meeting.put(self.turn, self.index, x.clone(), combine)
            _spoil(out)

        def take() -> None:
            for turn, out in enumerate(outs, first):
                result = self.meeting.take(turn)
                out.copy_(result.chunk(self.size())[self.index] if scatter else result)

        return _Pending(take)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        combine = _maximum if opts is not None and opts.reduceOp == dist.ReduceOp.MAX else _total
        return self._start(tensors, tensors, combine)

    def allgather_into_tensor_coalesced(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> dist.Work:
        return self._start(outs, ins, torch.cat)

    def reduce_scatter_tensor_coalesced(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> dist.Work:
        return self._start(outs, ins, _total, scatter=True)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        with self.meeting.ready:
            self.mail[self._message(self.index, dst)] = tensors[0].clone()
            self.meeting.ready.notify_all()
        return _Done()

    def _message(self, src: int, dst: int) -> tuple[int, int, int]:
        self.messages[src, dst] += 1
        return src, dst, self.messages[src, dst]

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        message = self._message(src, self.index)
        _spoil(tensors[0])

        def take() -> None:
            with self.meeting.ready:
                self.meeting.wait_until(lambda: message in self.mail, lambda: {src})
                sent = self.mail.pop(message)
            if sent.shape != tensors[0].shape or sent.dtype != tensors[0].dtype:
                raise RuntimeError(f"received {tuple(sent.shape)} {sent.dtype}, expected {tuple(tensors[0].shape)}")
            tensors[0].copy_(sent)

        return _Pending(take)


def _spoil(x: Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min)


def _total(parts: list[Tensor]) -> Tensor:
    out = parts[0].clone()
    for x in parts[1:]:
        out += x
    return out


def _maximum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).amax(0)


Groups = Mapping[str, Any]


def simulate(mesh: Mesh, names: Iterable[str], work: Callable[[int, Groups], T], patience: float = 300.0) -> list[T]:
    """Run `work(rank, groups)` on every rank of the mesh, each a thread, and return the results in rank order.

    The first failure stops all ranks and is raised here; a rank that waits `patience` seconds for others fails.
    """
    abort = threading.Event()
    meetings: dict[tuple[str, tuple[int, ...]], tuple[_Meeting, dict[tuple[int, int, int], Tensor]]] = {}
    for name in names:
        for members in all_groups(mesh, name):
            meetings[name, members] = (_Meeting(name, members, abort, patience), {})
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        groups: dict[str, Any] = {}
        try:
            for name in names:
                members = group_ranks(mesh, name, rank)
                if members:
                    groups[name] = SimulatedGroup(members.index(rank), *meetings[name, members])
                    register_group(name, groups[name])
            with torch.no_grad():
                results[rank] = work(rank, groups)
        except SimulationStoppedError:
            pass
        except BaseException as e:
            failures.append((rank, e))
            abort.set()
        finally:
            for name, group in groups.items():
                group.meeting.leave(group.index)
                unregister_group(name)

    with isolated_threads():
        threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in range(mesh.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if failures:
        raise failures[0][1]
    return [results[r] for r in range(mesh.world)]


@contextmanager
def stand_ins(mesh: Mesh, names: Iterable[str]) -> Iterator[None]:
    """While open, the group names resolve to groups of the right size that nobody talks through: what the
    compiler needs to see."""
    groups = {
        name: SimulatedGroup(0, _Meeting(name, range(group_size(mesh, name)), threading.Event()), {}) for name in names
    }
    for name, group in groups.items():
        register_group(name, group)
    try:
        yield
    finally:
        for name in groups:
            unregister_group(name)


# --------------------------------------------------------------------------------------------- real world


def join(mesh: Mesh, names: Iterable[str], rank: int, backend: str, timeout: float) -> Groups:
    """Create this rank's groups over the initialised process group and let graphs use their names.

    Every rank must call it with the same names in the same order. `timeout` is in seconds.
    """
    groups: dict[str, Any] = {}
    for name in names:
        for members in all_groups(mesh, name):
            group = dist.new_group(list(members), backend=backend, timeout=timedelta(seconds=timeout))
            if rank in members:
                groups[name] = group
                register_group(name, group)
    return groups


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank waits for the others: to start (compile, load), in a step, in a save."""

    start: float
    step: float
    save: float


def join_world(mesh: Mesh, names: Iterable[str], rank: int, backend: str, device: str, limits: Limits) -> Groups:
    """Join the processes of the run: the groups called `names`, and `start` and `save` over all ranks for what is
    agreed on outside of steps. One process has no groups. The rendezvous is read from the environment by torch.
    """
    if mesh.world == 1:
        return {}
    first: dict[str, Any] = {"timeout": timedelta(seconds=limits.start), "rank": rank, "world_size": mesh.world}
    if backend == "nccl":
        dist.init_process_group(f"cpu:{gloo()},cuda:nccl", device_id=torch.device(device), **first)
    else:
        backend = gloo()
        dist.init_process_group(backend, **first)
    # The watchdog holds each phase to its own limit; a collective must outlast the longest (a slow first compile).
    groups = dict(join(mesh, names, rank, backend, max(limits.start, limits.step, limits.save)))
    groups["start"] = dist.new_group(backend=gloo(), timeout=timedelta(seconds=limits.start))
    groups["save"] = dist.new_group(backend=gloo(), timeout=timedelta(seconds=limits.save))
    return groups

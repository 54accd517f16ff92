"""Where the dims of a mesh run: links, domains, and the order of dims that keeps slow links outside.

Ranks are packed: a dim steps over all ranks inside it, so a group along it spans `inside * size` neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dtrain import hardware
from dtrain.layout.errors import divisors, fail, listed
from dtrain.layout.schema import Cluster, Layout, MeshDim


class _Step(NamedTuple):
    """A mesh dim with its place: `inside` ranks are packed within one step along it."""

    dim: str
    size: int
    inside: int
    links: tuple[str, ...]

    @property
    def block(self) -> int:
        return self.inside * self.size


def _domain(cluster: Cluster) -> int:
    """How many GPUs of the cluster NVLink joins: a rack may have more than are used."""
    return min(cluster.nvlink_domain or cluster.gpus_per_node, cluster.nodes * cluster.gpus_per_node)


def _local(cluster: Cluster) -> tuple[str, int]:
    """The fast link inside a node or NVLink domain, and how many GPUs it joins."""
    if "nvlink" in cluster.links:
        return "nvlink", _domain(cluster)
    return "pcie" if "pcie" in cluster.links else "loopback", cluster.gpus_per_node


def _reach(cluster: Cluster, link: str) -> int:
    """How many neighbouring ranks a link joins; 0 means all."""
    return {"ib": 0, "nvlink": _domain(cluster)}.get(link, cluster.gpus_per_node)


def _fits(block: int, reach: int) -> bool:
    return reach == 0 or reach % block == 0


def resolve_links(cluster: Cluster, mesh: Mapping[str, MeshDim], order: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Each dim's links, as written or as its place in the order implies."""
    out: dict[str, tuple[str, ...]] = {}
    fast, reach = _local(cluster)
    inside = 1
    for dim in reversed(list(order)):
        written, size = mesh[dim].link, mesh[dim].size
        both = inside < reach and inside * size > reach and reach % inside == 0
        implied = (fast,) if size == 1 or _fits(inside * size, reach) else (fast, "ib") if both else ("ib",)
        out[dim] = written or implied
        inside *= size
    return out


def _steps(layout: Layout, order: Iterable[str], written: Mapping[str, MeshDim]) -> list[_Step]:
    links = resolve_links(layout.cluster, written, order)
    out, inside = [], 1
    for dim in reversed(list(order)):
        out.append(_Step(dim, written[dim].size, inside, links[dim]))
        inside *= written[dim].size
    return [step for step in reversed(out) if step.size > 1]


def levels(layout: Layout, dim: str, ranks: int) -> tuple[tuple[str, int], ...]:
    """The links under `ranks` neighbours along a dim, inner first, and how many ranks each joins: dp 64 whose step
    is 8 GPUs, in nodes of 16, is `(("nvlink", 2), ("ib", 32))`. Neighbours that do not fill whole domains are all
    booked on the slower link."""
    links = (layout.mesh[dim].link or ("loopback",)) if ranks > 1 else ()
    if len(links) < 2:
        return tuple((link, ranks) for link in links)
    order = list(layout.mesh)
    inside = math.prod(layout.mesh[d].size for d in order[order.index(dim) + 1 :])
    near = math.gcd(ranks, max(1, _reach(layout.cluster, links[0]) // inside))
    return tuple((link, n) for link, n in zip(links, (near, ranks // near), strict=True) if n > 1)


def link_between(layout: Layout, dim: str, places: Iterable[int]) -> str:
    """The link that joins these places along a dim: the inner one where they share its domain."""
    (inner, near), *outer = levels(layout, dim, layout.mesh[dim].size)
    return outer[0][0] if outer and len({place // near for place in places}) > 1 else inner


def link_rate(layout: Layout, link: str) -> float:
    """Bytes/s of a link for one GPU, one direction, when all GPUs of a node use it at once."""
    known = layout.cluster.links[link]
    return known.rate if known.per_node is None else known.rate * known.per_node / layout.cluster.gpus_per_node


def _misplaced(layout: Layout, steps: list[_Step]) -> tuple[str, str, str] | None:
    """The first dim that runs where it should not: (dim, check, message)."""
    cluster, allow = layout.cluster, layout.allow
    fast, reach = _local(cluster)
    for step in steps:
        dim, size, links = step.dim, step.size, step.links
        packed = f"{dim} {size} over groups of {step.inside}" if step.inside > 1 else f"{dim} {size}"
        if dim == "tp" and not _fits(step.block, max(reach, cluster.gpus_per_node)):
            if "tp-across-nodes" not in allow:
                return (
                    dim,
                    "tp-across-nodes",
                    f"{packed} leaves its node of {max(reach, cluster.gpus_per_node)} GPUs",
                )
            continue
        if len(links) == 2:
            near = _reach(cluster, links[0])
            if "spans-two-levels" not in allow and (_fits(step.block, near) or (near and step.inside >= near)):
                at_once = links[0] if _fits(step.block, near) else links[1]
                return dim, "spans-two-levels", f"{packed} runs over {at_once} alone; name that one link"
            continue
        limit = _reach(cluster, links[0])
        if not _fits(step.block, limit):
            if "link-leaves-domain" not in allow:
                return dim, "link-leaves-domain", f"{packed} leaves the {limit} GPUs that {links[0]} joins"
        elif (
            links[0] == "ib"
            and fast != "ib"
            and reach > 1
            and step.inside < reach < step.block
            and (reach % step.inside == 0 and "spans-two-levels" not in allow)
        ):
            return dim, "spans-two-levels", f"{packed} spans {fast} and ib; write link: [{fast}, ib]"
    for outer, inner in itertools.combinations(steps, 2):
        slow = min(inner.links, key=lambda name: link_rate(layout, name))
        quick = max(outer.links, key=lambda name: link_rate(layout, name))
        if link_rate(layout, slow) < link_rate(layout, quick) and "slow-inside-fast" not in allow:
            rates = [hardware.show_rate(link_rate(layout, name)) for name in (slow, quick)]
            return (
                inner.dim,
                "slow-inside-fast",
                f"{inner.dim} over {slow} ({rates[0]}) is inside {outer.dim} over {quick} ({rates[1]})",
            )
    return None


def check_mesh(layout: Layout) -> None:
    cluster, mesh = layout.cluster, layout.mesh
    if layout.sizes["cp"] > 1:
        fail(
            layout,
            "mesh.cp.size",
            f"{layout.sizes['cp']}; context parallelism is not supported yet; use cp: {{size: 1}}",
        )
    product = math.prod(d.size for d in mesh.values())
    if product != layout.world:
        sizes = " x ".join(f"{dim} {d.size}" for dim, d in mesh.items()) or "no dims"
        fail(
            layout,
            "mesh",
            f"{sizes} = {product} ranks; must equal the {layout.world} GPUs of cluster "
            f"(nodes {cluster.nodes} x gpus_per_node {cluster.gpus_per_node})",
        )
    domain = cluster.nvlink_domain or cluster.gpus_per_node
    if domain % cluster.gpus_per_node and cluster.gpus_per_node % domain:
        fail(
            layout,
            "cluster.nvlink_domain",
            f"{domain}; must divide gpus_per_node ({cluster.gpus_per_node}) or be a multiple of it",
        )
    for dim, d in mesh.items():
        for link in d.link or ():
            if link not in cluster.links and d.size > 1:
                have = ", ".join(cluster.links)
                fail(
                    layout,
                    f"mesh.{dim}.link",
                    f"{link}; the cluster's links are {have}; add it to cluster.links",
                )
    written = {
        d: m if f"mesh.{d}.link" in layout._where else m.model_copy(update={"link": None}) for d, m in mesh.items()
    }
    problem = _misplaced(layout, _steps(layout, list(mesh), written))
    if problem is None:
        return
    dim, check, message = problem
    orders = (o for o in itertools.permutations(mesh) if _misplaced(layout, _steps(layout, o, written)) is None)
    order = next(orders, None)
    if order is not None:
        remedy = f"this order works, outermost first: {', '.join(order)}"
    elif check == "tp-across-nodes":
        reach = max(_local(cluster)[1], cluster.gpus_per_node)
        remedy = f"tp may be {listed(divisors(reach))}"
    else:
        remedy = "write link: ib" if check == "link-leaves-domain" else "no order of these sizes and links works"
    if check == "spans-two-levels" and order is None:  # the message says which links to write
        fail(layout, f"mesh.{dim}", f"{message}; or write allow: [{check}]")
    fail(layout, f"mesh.{dim}", f"{message}; {remedy}; or write allow: [{check}]")

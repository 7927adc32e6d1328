"""Rules about the end of a CTA: what has to be finished, waited for and given back by then.

Sources in the PTX ISA: "mbarrier" (phases, the transaction count), "cp.async.bulk.wait_group" (a source may be reused
once it is read), "tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit" (all that was allocated has to be
freed), "Parallel Synchronization and Communication Instructions: barrier".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.machine.memory import RANK_SHIFT

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.warp import Warp

__all__ = ["cta_ended"]


def cta_ended(cta: Cta, last: Warp) -> None:
    """Adds what a CTA left unfinished to the findings of its grid.  last: the warp that ended last."""
    _bulk_stores(cta)
    _warpgroups(cta)
    _operations(cta)
    _mbarriers(cta, last)
    _named_barriers(cta, last)
    _tensor_memory(cta, last)


def _bulk_stores(cta: Cta) -> None:
    """Stores whose source may still be read, as no wait_group of the issuing thread covers them."""
    findings = cta.cluster.grid.findings
    for warp in cta.warps:
        groups = warp.state.get("cp.async.bulk")
        for store in groups.unwaited if groups is not None else ():
            missing = "cp.async.bulk.wait_group" if store.group else "cp.async.bulk.commit_group and wait_group"
            message = f"the CTA ended without {missing}, so shared memory that the store reads may be gone"
            findings.add("bulk store not waited for", message, line=store.read.line, warp=warp)


def _operations(cta: Cta) -> None:
    """Other asynchronous operations that are still under way."""
    grid = cta.cluster.grid
    found = [op for op in grid.queue.outstanding() if op.warp is not None and op.warp.cta is cta]
    for operation in sorted(found, key=lambda op: op.serial):
        if not _stores(operation.what) and operation.what != "wgmma.mma_async":
            message = f"{operation.what} was still under way when its CTA ended"
            grid.findings.add("operation outstanding at exit", message, line=operation.line, warp=operation.warp)


def _warpgroups(cta: Cta) -> None:
    """wgmma operations that their warps did not wait for."""
    for warp in cta.warps:
        issued = warp.state.get("wgmma")
        left = (*issued.older(0), *issued.open) if issued is not None else ()
        for line in dict.fromkeys(operation.line for operation in left):
            message = "the warp ended without a wgmma.wait_group for it"
            cta.cluster.grid.findings.add("wgmma not waited for", message, line=line, warp=warp)


def _stores(what: str) -> bool:
    """Whether an operation writes global memory from shared memory, which the end of a kernel waits for."""
    return what.removesuffix(" (reading its source)").endswith("store") or what.startswith("cp.reduce.async.bulk")


def _mbarriers(cta: Cta, last: Warp) -> None:
    findings = cta.cluster.grid.findings
    for address, barrier in cta.cluster.mbarriers.items():
        if address >> RANK_SHIFT != cta.rank or barrier.idle:
            continue
        wrong = barrier.mismatch()
        kind = "transaction bytes" if wrong else "barrier left mid-phase"
        message = f"the CTA ended with {barrier}" + (f"; {wrong}" if wrong else "")
        findings.add(kind, message, line=barrier.line, warp=last, address=address, allocation=str(cta.region))


def _named_barriers(cta: Cta, last: Warp) -> None:
    for barrier in cta.barriers:
        if barrier.arrived:
            cta.cluster.grid.findings.add("barrier left mid-phase", f"the CTA ended with {barrier}", warp=last)


def _tensor_memory(cta: Cta, last: Warp) -> None:
    for column, columns in cta.tmem.allocations.items():
        message = f"the CTA ended without freeing {columns} columns at {column:#x}"
        line = cta.tmem.lines.get(column, 0)
        cta.cluster.grid.findings.add("tensor-memory leak", message, line=line, warp=last)

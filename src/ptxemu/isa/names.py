"""Short names of opcodes, for counters: the operation without its types, scopes and hints."""

from __future__ import annotations

import functools

__all__ = ["short"]

_SPACES = "global shared shared::cta shared::cluster local param const"
# The words that say what an instruction of a family does; other opcodes are named by their first word.
_WORDS: dict[str, str] = {
    "ld": _SPACES,
    "st": f"{_SPACES} async",
    "atom": _SPACES,
    "red": f"{_SPACES} async",
    "cp": "async bulk tensor prefetch reduce commit_group wait_group wait_all mbarrier arrive global shared::cta "
    "shared::cluster",
    "mbarrier": "init inval arrive arrive_drop expect_tx complete_tx test_wait try_wait pending_count",
    "tcgen05": "alloc dealloc relinquish_alloc_permit ld st mma cp shift commit wait::ld wait::st "
    "fence::before_thread_sync fence::after_thread_sync",
    "wgmma": "mma_async fence commit_group wait_group",
    "fence": "proxy mbarrier_init async alias tensormap::generic acquire release",
    "bar": "sync arrive red warp",
    "barrier": "cluster sync arrive wait red",
    "griddepcontrol": "wait launch_dependents",
    "clusterlaunchcontrol": "try_cancel query_cancel",
}
_KEPT = {base: frozenset(words.split()) for base, words in _WORDS.items()}


@functools.lru_cache(maxsize=4096)
def short(opcode: str) -> str:
    """ "tcgen05.mma" of "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16"."""
    base, *rest = opcode.split(".")
    kept = _KEPT.get(base, frozenset())
    return ".".join([base, *(word for word in rest if word in kept)])

"""The instruction table, a file per chapter of the PTX manual.  Importing this package fills the table."""

import importlib

# Order matters only where two forms match the same text: the earlier one wins.
CHAPTERS = (
    "integer",
    "integer_parts",
    "extended",
    "logic",
    "floating",
    "compare",
    "compare_pairs",
    "move",
    "convert",
    "memory",
    "control",
    "collective",
    "barrier",
    "mbarrier",
    "sync",
    "cp_async",
    "remote",
    "matrix",
    "mma",
    "bulk_groups",
    "bulk",
    "tensor_memory",
    "tcgen05",
    "wgmma",
)

for _chapter in CHAPTERS:
    importlib.import_module(f"ptxemu.isa.{_chapter}")

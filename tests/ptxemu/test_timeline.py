"""tools/timeline.py draws a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_report import launched

TOOL = Path(__file__).parents[2] / "tools" / "timeline.py"


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "t.json", tmp_path / "t.svg"
    launched("fifo").trace(trace)
    names = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"}
    subprocess.run([sys.executable, str(TOOL), str(trace), str(picture)], check=True)
    drawn = picture.read_text()
    assert all(name in drawn for name in names if not name[-1].isdecimal())
    assert drawn.count("<path") > 10

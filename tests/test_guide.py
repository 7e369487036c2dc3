"""The code in GUIDE.md runs, top to bottom, in one namespace."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.utils import fresh_cache

import torchvm
from torchvm.ops import contracts

if TYPE_CHECKING:
    import pytest


def test_guide(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {op: dict(by_arg) for op, by_arg in contracts._READERS.items()}
    monkeypatch.setattr(contracts, "_READERS", copied)
    text = (pytestconfig.rootpath / "GUIDE.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 5
    torch._dynamo.reset()
    torchvm.clear_reports()
    namespace: dict[str, Any] = {}
    with fresh_cache():
        for block in blocks:
            exec(compile(block, "GUIDE.md", "exec"), namespace)  # noqa: S102 - our own page
    torch._dynamo.reset()

"""Imports that peft makes when it looks at a network, and a switch of its adapters."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from finetune.utils.compat.library_versions import require


@contextmanager
def adapters_off(network: Any) -> Iterator[None]:
    """Has a network compute as if it had no adapters.

    peft's own `disable_adapter` also freezes them in between, and backends have looked by then which weights train.
    Source: peft 0.21, `BaseTunerLayer.enable_adapters` in `tuners/tuners_utils.py`.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    require("peft", BaseTunerLayer, "_disable_adapters")
    layers = [module for module in network.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Keeps peft from importing bitsandbytes, which compiles functions when it is imported: a second of each start.

    peft asks whether a module that it adapts is of one of its classes. None is unless bitsandbytes was imported before;
    where it was, nothing is kept from anyone. Afterwards imports find it again.
    Source: peft 0.21, `_create_new_module` in `tuners/lora/model.py`, and `helpers.py`, which guards its import.
    """
    if "bitsandbytes" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    # Python's own way to say that there is none: `import` raises ImportError, and `find_spec` returns None.
    modules["bitsandbytes"] = None
    try:
        yield
    finally:
        del modules["bitsandbytes"]
        from peft import import_utils

        require("peft", import_utils, "is_bnb_available", "is_bnb_4bit_available")
        # They remember what they have found.
        import_utils.is_bnb_available.cache_clear()
        import_utils.is_bnb_4bit_available.cache_clear()

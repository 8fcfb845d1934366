"""The project's own tools as modules: tools/ is no package and is not installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parent.parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    qualified = f"kina_tools_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[qualified]

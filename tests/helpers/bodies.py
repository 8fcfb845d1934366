"""What `helpers.cuda.fork_body` runs in a child: everything that a body uses is imported before the fork."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
from helpers import cuda

import kina

__all__ = ["run"]

#: What the body leaves in its module lives until the interpreter ends, as in a process of its own.
names: dict[str, Any] = {each.__name__: each for each in (gc, os, sys, threading, pytest, kina)} | {"np": np}


def run(source: str) -> None:
    names.update({name: getattr(cuda, name) for name in cuda.__all__}, sim=cuda.simulation())
    exec(source, names)

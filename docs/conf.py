"""Sphinx configuration: tools/check.py --lane docs builds it, and documents the installed package."""

import importlib
import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "kina"
author = "The kina authors"
copyright = author
version = release = importlib.metadata.version("kina")
# Compiled, before autodoc puts the stubs of the modules it is made with in their place.
importlib.import_module("kina").from_dlpack  # noqa: B018

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "errors_table",
]
exclude_patterns = ["_build", "_extensions"]

# "dtype" in the type of a parameter is prose, not a reference to one of the attributes named so.
suppress_warnings = ["ref.python"]

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "class"
python_maximum_signature_line_length = 88

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"kina {version}"

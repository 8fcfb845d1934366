"""The committed type stubs are those that the sources give; the lint lane runs stubtest on them."""

from helpers.tools import load_tool


def test_the_stubs_are_current():
    assert "".join(load_tool("stubs").differences()) == ""


def test_every_cython_module_says_what_is_public():
    stubs = load_tool("stubs")
    assert [path for path in stubs.PACKAGE.rglob("*.pyx") if stubs.public_names(path) is None] == []

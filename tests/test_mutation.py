"""The patches that break kina on purpose: each fits the tree, says what it breaks and who must notice.

Whether they notice is shown by tests/mutation/run.py, which takes minutes.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = ROOT / "tests" / "mutation" / "run.py"


def load():
    spec = importlib.util.spec_from_file_location("kina_mutation_run", RUN)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutation = load()
PATCHES = sorted(mutation.PATCHES.iterdir())


def test_the_patches_are_numbered():
    numbers = [re.fullmatch(r"(\d{2,3})-[a-z0-9-]+\.patch", path.name)[1] for path in PATCHES]
    assert len(numbers) >= 20
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_fits_the_tree(path):
    patch = mutation.read_patch(path)
    for name, text in patch.apply(ROOT).items():
        assert text != (ROOT / name).read_text()


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_names_tests_that_exist(path):
    for test in mutation.read_patch(path).tests:
        name, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / name).read_text()


# The form of a patch --------------------------------------------------------------------------------------

SOURCE = "one\ntwo\nthree\nfour\n"
HEADER = "Promise: two is two.\nTests: tests/cuda/test_x.py::test_two\n\n"
DIFF = "--- a/kina/x.pyx\n+++ b/kina/x.pyx\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"


@pytest.fixture
def made(tmp_path):
    (tmp_path / "kina").mkdir()

    def make(header=HEADER, diff=DIFF, source=SOURCE):
        (tmp_path / "kina" / "x.pyx").write_text(source)
        (tmp_path / "01-two.patch").write_text(header + diff)
        return mutation.read_patch(tmp_path / "01-two.patch").apply(tmp_path)

    return make


@pytest.mark.parametrize("above", ["", "zero\n" * 100])
def test_a_hunk_goes_where_its_lines_stand(made, above):
    assert made(source=above + SOURCE) == {"kina/x.pyx": above + "one\n2\nthree\nfour\n"}


@pytest.mark.parametrize("source", ["", "one\ntwo\nfour\n", SOURCE + SOURCE, SOURCE.replace("one", "not one")])
def test_a_hunk_that_does_not_fit_one_place(made, source):
    with pytest.raises(mutation.PatchError, match=r"hunk 1 of kina/x.pyx fits [02] places, not one"):
        made(source=source)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"header": ""}, "are needed"),
        ({"header": HEADER.replace("Promise: two is two.\n", "")}, "are needed"),
        ({"header": HEADER.replace("tests/cuda/test_x.py::test_two", "")}, "are needed"),
        ({"header": "Why: because\n" + HEADER}, "'Why: because' is neither"),
        ({"diff": ""}, "changes nothing"),
        ({"diff": DIFF.replace("kina/x.pyx", "setup.py")}, "setup.py is no source file of kina"),
        ({"diff": DIFF.replace(" three\n", "")}, "ends early"),
        ({"diff": DIFF + "four\n"}, "'four' belongs to no unified diff"),
    ],
)
def test_a_patch_that_cannot_be_read(made, broken, words):
    with pytest.raises(mutation.PatchError, match=words):
        made(**broken)


def test_what_is_written_anew_does_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "kina").mkdir()
    repeated = "zero\n" * 9
    (tmp_path / "kina" / "x.pyx").write_text(repeated + SOURCE + repeated)
    path = tmp_path / "01-two.patch"
    path.write_text(HEADER + DIFF)
    before = mutation.read_patch(path).apply(tmp_path)
    assert mutation.refresh(mutation.read_patch(path))
    assert "@@ -8,7 +8,7 @@" in path.read_text()
    assert mutation.read_patch(path).apply(tmp_path) == before
    assert not mutation.refresh(mutation.read_patch(path))

"""The directive ``kina-errors``: the tree of kina.errors as a table, made from the installed classes."""

from __future__ import annotations

from docutils import nodes
from errors_rows import rows
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

HEADER = ("class", "also a", "detail", "status", "means")


class ErrorsTable(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        table = nodes.table()
        group = nodes.tgroup(cols=len(HEADER))
        table += group
        group += [nodes.colspec(colwidth=width) for width in (3, 3, 1, 2, 8)]
        head, body = nodes.thead(), nodes.tbody()
        group += [head, body]
        head += self.row(HEADER, [False] * len(HEADER))
        for cells in rows():
            body += self.row(cells, [True, True, False, False, False])
        return [table]

    @staticmethod
    def row(cells: tuple[str, ...], as_code: list[bool]) -> nodes.row:
        row = nodes.row()
        for cell, code in zip(cells, as_code, strict=True):
            text = nodes.literal(cell, cell) if code else nodes.Text(cell.replace("``", ""))
            row += nodes.entry("", nodes.paragraph("", "", text))
        return row


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("kina-errors", ErrorsTable)
    return {"parallel_read_safe": True}

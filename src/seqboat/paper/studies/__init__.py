"""Studies: models against each other at equal processor time.

    study = STUDIES["tables"]
    cells = study.cells(budget=60.0)        every run: a trial, a seed and a budget
    run_cells(cells, page, out)             runs what has no record yet
    write_page(page)                        tables and figures from all records

`budget` spends the time of one run, `store` keeps the records, one file per study says what it consists of and how it
is shown.
"""

from __future__ import annotations

from seqboat.paper.studies.in_context import IN_CONTEXT
from seqboat.paper.studies.scaling import SCALING
from seqboat.paper.studies.study import Study
from seqboat.paper.studies.tables import TABLES

STUDIES: dict[str, Study] = {study.name: study for study in (TABLES, IN_CONTEXT, SCALING)}
"""Every study by its name, in the order of the page."""

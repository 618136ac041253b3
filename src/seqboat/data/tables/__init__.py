"""Tables in files: CSV with any delimiter, TSV, JSON lines, JSON arrays and Parquet, read in bounded memory.

    for record in read_records(path, ("text", "label"), skips):
        record.line, record.values["text"]

Column names, encoding and delimiter are detected from the first megabyte. A warning says so if the file is not UTF-8,
or not separated as its name suggests.
"""

from seqboat.data.tables.delimited import MAX_LABEL
from seqboat.data.tables.detect import TABLE_SUFFIXES, check_known
from seqboat.data.tables.records import TableRecord, bad_text, is_table, read_records

__all__ = [
    "MAX_LABEL",
    "TABLE_SUFFIXES",
    "TableRecord",
    "bad_text",
    "check_known",
    "is_table",
    "read_records",
]

"""Write a page that runs a language model in a browser: `make browser`.

python tools/browser.py build/browser    # needs npm and a network, once

The folder has the page (`examples/onnx/browser`), the exported step of a model, and onnxruntime-web from the npm
registry, whose checksum is below. Any web server on this machine can show it; at run time the page asks for nothing
else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "examples" / "onnx" / "browser"
VERSION = "1.30.0"
SHA512 = (
    "ab4cbe26baedba45d2cec05610c71c55fa97db92d19a8b171c5f8269126683ca"
    "590a5cdc57bb2f35ce2b298de32f4d956fb42644c0ecd528a0a91e025c07ca61"
)
"""Of the package onnxruntime-web in this version."""
FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
"""What the page needs of it."""


def fetch_runtime(folder: Path) -> None:
    """Put onnxruntime-web into a folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("npm is not installed: it fetches onnxruntime-web")
    with tempfile.TemporaryDirectory() as place:
        package = f"onnxruntime-web@{VERSION}"
        done = subprocess.run(
            [npm, "pack", "--silent", package], cwd=place, capture_output=True, text=True, check=False
        )
        found = list(Path(place).glob("*.tgz"))
        if done.returncode or len(found) != 1:
            raise ValueError(f"npm could not fetch {package}: {' '.join(done.stderr.split())[:200]}")
        if hashlib.sha512(found[0].read_bytes()).hexdigest() != SHA512:
            raise ValueError(f"{package} is not the file that was tested: its checksum differs")
        folder.mkdir()
        with tarfile.open(found[0]) as archive:
            for name in FILES:
                member = archive.extractfile(f"package/dist/{name}")
                assert member is not None
                (folder / name).write_bytes(member.read())


def write_page(folder: Path, run: str) -> None:
    """Write the page with the model of a run; the folder appears complete or not at all, and replaces an old one."""
    from seqboat.onnx.export import export_run
    from seqboat.run import Run

    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        export_run(Run(run), stage, ("step",))
        fetch_runtime(stage / "ort")
        for path in PAGE.iterdir():
            shutil.copy(path, stage / path.name)
        if folder.exists():
            if not (folder / "page.js").is_file():
                raise ValueError(f"{folder} is something else: choose a folder that does not exist yet")
            shutil.rmtree(folder)
        os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a page that runs a language model in a browser.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--run", default="enwik8-medium", help="folder of a run, or the name of a shipped model"
    )
    options = parser.parse_args()
    try:
        write_page(options.folder.absolute(), options.run)
    except ValueError as error:
        print(f"browser: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}: python -m http.server --bind 127.0.0.1 --directory {options.folder} 8000")
    return 0


if __name__ == "__main__":
    sys.exit(main())

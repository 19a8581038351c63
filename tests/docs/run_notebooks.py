"""Execute the tutorials: ``python -m tests.docs.run_notebooks`` does, and saves their outputs.

Each notebook runs in an empty folder, as for a reader who has installed the package. Times,
progress bars and warnings are then removed from its outputs.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT = 3600
"""Seconds for a cell."""
STARTUP_TIMEOUT = 600
"""Seconds until a kernel answers, on a busy machine."""
CHECK = "check"
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NOISE = re.compile(r"\d+%\|.*\||it/s\]|^[╭│╰]|^\{'train_runtime'")
"""Lines of progress bars and live views, or with the time that transformers prints after them."""
TIMES = re.compile(r", (?:\d+:)?\d+:\d\d, \S+ left")
"""Times in lines of progress."""


def execute(notebook, folder, parameters=None):
    """Run a notebook in `folder`; `parameters` replace those of its cell with that tag."""
    if parameters is not None:
        cell = parameters_cell(notebook)
        assert {*assigned(cell)} == {*parameters}, "the notebook has other parameters"
        cell.source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(folder.parent / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder.parent / "jupyter"),
    }
    notebook.cells = [*with_checks(notebook.cells)]
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        startup_timeout=STARTUP_TIMEOUT,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # no word on the loopback connection
        resources={"metadata": {"path": folder}},
    )
    client.execute(env=os.environ | paths)
    notebook.cells = [cell for cell in notebook.cells if CHECK not in cell.metadata.get("tags", ())]
    return notebook


def with_checks(cells):
    """Yield the cells, and after each command one that fails if the command did."""
    for cell in cells:
        yield cell
        if cell.cell_type == "code" and cell.source.startswith("!"):
            source = 'assert _exit_code == 0, "the command failed"'
            yield nbformat.v4.new_code_cell(source, metadata={"tags": [CHECK]})


def parameters_cell(notebook):
    """Return the cell with the tag ``parameters``."""
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    return cell


def assigned(cell):
    """Return the values that a cell of plain assignments gives to names."""
    values = {}
    exec(cell.source, {}, values)
    return values


def clean(notebook):
    """Keep of the outputs what a reader of the page wants to see."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    num_executed = 0
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = num_executed = num_executed + 1
            shown = merged([o for o in cell.outputs if o.get("name") != "stderr"])
            cell.outputs = [output for output in shown if simplify(output)]
    return notebook


def simplify(output):
    """Keep the text or the picture of an output; return whether anything is left."""
    data = output.get("data", {})
    if "image/png" in data:
        output.data = {"image/png": data["image/png"]}
        output.metadata = {}
    elif "data" in output:
        output.data = {"text/plain": plain(data["text/plain"])}
        return bool(output.data["text/plain"])
    else:
        output.text = plain(output.text)
        return bool(output.text)
    return True


def plain(text):
    """Return text without escape sequences and overwritten or trailing parts of lines."""
    lines = ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    lines = [TIMES.sub("", line.rpartition("\r")[2]).rstrip() for line in lines]
    kept = "\n".join(line for line in lines if not NOISE.search(line))
    return kept if kept.strip() else ""


def merged(outputs):
    """Join the texts that one cell shows, one after the other."""
    joined = []
    for output in outputs:
        data = output.get("data", {})
        text = output.get("text", data.get("text/plain"))
        if text is None or "image/png" in data:
            joined.append(output)
        elif joined and joined[-1].output_type == "stream":
            joined[-1].text += text
        else:
            joined.append(nbformat.v4.new_output("stream", name="stdout", text=text))
    return joined


def main():
    """Execute notebooks and save them in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[path.stem for path in NOTEBOOKS])
    for name in parser.parse_args().names:
        path, started = FOLDER / f"{name}.ipynb", time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            (work := Path(folder) / "work").mkdir()
            execute(notebook, work)
        nbformat.write(clean(notebook), path)
        sys.stdout.write(f"{name}: {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()

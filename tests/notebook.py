"""Runs the code of a notebook, cell by cell, in plain Python: Jupyter's packages would be used for nothing else.

`python tests/notebook.py examples/tour.ipynb` runs it and stores what its cells print and draw.
"""

import base64
import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook):
    """Give every cell of code the outputs of this run, as Jupyter would."""
    program = {}
    for number, cell in enumerate(code_cells(notebook), 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), program)
        text = printed.getvalue()
        outputs = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
        cell["outputs"] = outputs + [drawn(plt.figure(figure)) for figure in plt.get_fignums()]
        cell["execution_count"] = number
        plt.close("all")


def drawn(figure):
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    data = {"image/png": base64.b64encode(picture.getvalue()).decode() + "\n", "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def fingerprint(notebook):
    """Of the code: outputs that are stored with another one are not those of this code."""
    return hashlib.sha256(json.dumps([cell["source"] for cell in code_cells(notebook)]).encode()).hexdigest()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    notebook = json.loads(path.read_text())
    run(notebook)
    notebook["metadata"]["code_of_outputs"] = fingerprint(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")

# ruff: noqa: INP001 - mkdocs loads it by its path
"""Show notebooks as pages: their cells and committed outputs, as Markdown.

The pages look like all others, in light and dark, load nothing, and their links and anchors are
checked by ``mkdocs build --strict``. (mkdocs-jupyter inserts ready-made HTML: light only, links
unresolved, with scripts from other servers.)
"""

import base64
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

WRITTEN = re.compile(r"%%writefile (?P<name>\S+)\n")


class NotebookPage(File):
    """A page under the name of its notebook, so that links to the notebook find it."""

    def is_documentation_page(self) -> bool:
        """Return True, although it is no Markdown file."""
        return True


def replace_notebooks(files: Files, config: MkDocsConfig) -> None:
    """Replace each notebook among the files by its page and its pictures."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8"))
        pictures: dict[str, bytes] = {}
        page = "\n\n".join(_parts(notebook, Path(file.src_uri).stem, pictures)) + "\n"
        files.remove(file)
        files.append(NotebookPage.generated(config, file.src_uri, content=page))
        for name, picture in pictures.items():
            uri = posixpath.join(posixpath.dirname(file.src_uri), name)
            files.append(File.generated(config, uri, content=picture))


def _parts(notebook: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """Yield the cells and outputs as Markdown; add the pictures, with their names."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        if written := WRITTEN.match(source):
            yield _block(source[written.end() :], f'python title="{written["name"]}"')
        else:
            yield _block(source, "sh" if source.startswith("!") else "python")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                yield f"![{cell['metadata'].get('alt', '')}]({name}){{ .figure }}"
            else:
                yield _block("".join(data["text/plain"]), "{ .text .output }")


def _block(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"

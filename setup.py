"""The description on a package index: README.md, whose relative links work in a repository only.

A release sets README_LINKS to the address of its files, such as ``https://.../blob/v0.1.0``. Other
builds keep the text of the links and drop the pictures.
"""

import os
import re
from pathlib import Path

from setuptools import setup

RELATIVE = re.compile(r"(?P<mark>!?)\[(?P<text>[^]]*)\]\((?!https?:)(?P<path>[^)]*)\)")


def describe(readme: str, address: str | None) -> str:
    """Return README.md with absolute links, or without relative ones if there is no address."""

    def replace(match: re.Match[str]) -> str:
        mark, text, path = match.groups()
        if not address:
            return "" if mark else text
        return f"{mark}[{text}]({address}/{path}{'?raw=true' if mark else ''})"

    return RELATIVE.sub(replace, readme)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=describe(readme, os.environ.get("README_LINKS")),
        long_description_content_type="text/markdown",
    )

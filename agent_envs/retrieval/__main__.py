"""Command line: index passages, and serve an index by Search-R1's protocol.

::

    python -m agent_envs.retrieval passages.jsonl.gz index
    python -m agent_envs.retrieval serve index
"""

import argparse
import sys
from collections.abc import Sequence

from agent_envs.core.lookup import require_extra
from agent_envs.errors import AgentEnvsError
from agent_envs.retrieval.corpus import Corpus, load_passages
from agent_envs.retrieval.index import SavedIndex, save_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["serve"]:
            _serve(words[1:])
        else:
            _index(words)
    except AgentEnvsError as error:
        sys.exit(f"retrieval: {error}")


def _index(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.retrieval", description="Index passages into a folder.",
        epilog="`python -m agent_envs.retrieval serve FOLDER` serves it.",
    )  # fmt: skip
    parser.add_argument("corpus", nargs="+", help="files with rows of 'title' and 'text'")
    parser.add_argument("folder", help="where to write the index; must be new")
    options = parser.parse_args(arguments)
    corpus = Corpus(passage for path in options.corpus for passage in load_passages(path))
    save_index(corpus, options.folder)
    print(f"{len(corpus):,} passages: {options.folder}")  # noqa: T201


def _serve(arguments: Sequence[str]) -> None:
    require_extra("serve", "A retrieval server", "starlette", "uvicorn")
    from agent_envs.retrieval.service import serve

    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.retrieval serve", description="Serve an index."
    )
    parser.add_argument("index", help="folder of the index")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; no authentication")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for a free one")
    options = parser.parse_args(arguments)
    serve(SavedIndex(options.index), host=options.host, port=options.port)


if __name__ == "__main__":
    main()

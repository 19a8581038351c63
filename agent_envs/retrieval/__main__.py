"""Command line: index passages, embed them, and serve an index.

::

    python -m agent_envs.retrieval passages.jsonl.gz index       # BM25
    python -m agent_envs.retrieval embed index vectors --model sentence-transformers/...
    python -m agent_envs.retrieval serve index --dense vectors
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from agent_envs.core.lookup import require_extra
from agent_envs.errors import AgentEnvsError
from agent_envs.retrieval.corpus import Corpus, Retriever, load_passages
from agent_envs.retrieval.fusion import FusedRetriever
from agent_envs.retrieval.index import SavedIndex, save_index

PROGRAM: Final = "python -m agent_envs.retrieval"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"embed": _embed, "serve": _serve}
    name = words[0] if words and words[0] in commands else ""
    others = " and ".join(f"`{PROGRAM} {command} --help`" for command in commands)
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", epilog=f"See also {others}.")
    try:
        commands.get(name, _index)(parser, words[bool(name) :])
    except AgentEnvsError as error:
        sys.exit(f"retrieval: {error}")


def _index(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.description = "Index passages into a folder."
    parser.add_argument("corpus", nargs="+", help="files with rows of 'title' and 'text'")
    parser.add_argument("folder", help="where to write the index; must be new")
    options = parser.parse_args(arguments)
    corpus = Corpus(passage for path in options.corpus for passage in load_passages(path))
    save_index(corpus, options.folder)
    print(f"{len(corpus):,} passages: {options.folder}")  # noqa: T201


def _embed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    from agent_envs.retrieval.dense import embed_index

    parser.description = "Embed the passages of an index, for dense retrieval."
    parser.add_argument("index", help="folder of the index")
    parser.add_argument("folder", help="where to write the embeddings; must be new")
    parser.add_argument("--model", required=True, help="for sentence-transformers: folder or name")
    parser.add_argument("--query_prefix", default="", help="such as 'query: ' for E5")
    parser.add_argument("--passage_prefix", default="", help="such as 'passage: ' for E5")
    options = vars(parser.parse_args(arguments))
    index, folder = SavedIndex(options.pop("index")), options.pop("folder")
    embed_index(index, folder, **options)
    print(f"{len(index.passages):,} passages: {folder}")  # noqa: T201


def _serve(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    require_extra("serve", "A retrieval server", "starlette", "uvicorn")
    from agent_envs.retrieval.service import make_app, serve

    parser.description = "Serve an index by Search-R1's protocol."
    parser.add_argument("index", help="folder of the index")
    parser.add_argument("--dense", help="folder of its embeddings")
    parser.add_argument("--engine", choices=("dense", "fused"), help="with --dense; default: fused")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; no authentication")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for a free one")
    options = parser.parse_args(arguments)
    if options.engine and not options.dense:
        parser.error(f"--engine {options.engine} needs --dense")
    index, engine = SavedIndex(options.index), "bm25"
    retriever: Retriever = index
    if options.dense:
        from agent_envs.retrieval.dense import DenseIndex

        engine, dense = options.engine or "fused", DenseIndex(index, options.dense)
        retriever = dense if engine == "dense" else FusedRetriever(index, dense)
    app = make_app(retriever, engine=engine, num_passages=len(index.passages))
    serve(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()

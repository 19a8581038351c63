"""Command line: index passages, embed them, and serve an index.

::

    python -m agent_envs.retrieval passages.jsonl.gz index       # BM25
    python -m agent_envs.retrieval embed index vectors --model sentence-transformers/...
    python -m agent_envs.retrieval serve index --dense vectors
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
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
    command = _COMMANDS.get(words[0]) if words else None
    try:
        if command is None:
            _index(words)
        else:
            command(words[1:])
    except AgentEnvsError as error:
        sys.exit(f"retrieval: {error}")


def _index(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Index passages into a folder.",
        epilog=f"See also `{PROGRAM} embed --help` and `{PROGRAM} serve --help`.",
    )
    parser.add_argument("corpus", nargs="+", help="files with rows of 'title' and 'text'")
    parser.add_argument("folder", help="where to write the index; must be new")
    options = parser.parse_args(arguments)
    corpus = Corpus(passage for path in options.corpus for passage in load_passages(path))
    save_index(corpus, options.folder)
    print(f"{len(corpus):,} passages: {options.folder}")  # noqa: T201


def _embed(arguments: Sequence[str]) -> None:
    from agent_envs.retrieval.dense import embed_index

    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} embed", description="Embed the passages of an index, for dense retrieval."
    )
    parser.add_argument("index", help="folder of the index")
    parser.add_argument("folder", help="where to write the embeddings; must be new")
    parser.add_argument("--model", required=True, help="for sentence-transformers: folder or name")
    parser.add_argument("--query_prefix", default="", help="such as 'query: ' for E5")
    parser.add_argument("--passage_prefix", default="", help="such as 'passage: ' for E5")
    parser.add_argument("--kind", default="Flat", help="of faiss (default: Flat, exact)")
    options = vars(parser.parse_args(arguments))
    index, folder = SavedIndex(options.pop("index")), options.pop("folder")
    embed_index(index, folder, **options)
    print(f"{len(index.passages):,} passages: {folder}")  # noqa: T201


def _serve(arguments: Sequence[str]) -> None:
    require_extra("serve", "A retrieval server", "starlette", "uvicorn")
    from agent_envs.retrieval.service import Service, serve

    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} serve", description="Serve an index by Search-R1's protocol."
    )
    parser.add_argument("index", help="folder of the index")
    parser.add_argument("--dense", help="folder of its embeddings")
    parser.add_argument(
        "--engine",
        choices=("bm25", "dense", "fused"),
        help="default: fused with --dense, else bm25",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; no authentication")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 for a free one")
    options = parser.parse_args(arguments)
    engine = options.engine or ("fused" if options.dense else "bm25")
    if (engine == "bm25") == bool(options.dense):
        parser.error("--engine dense and fused need --dense, and bm25 does not take it")
    index = SavedIndex(options.index)
    retriever: Retriever = index
    if options.dense:
        from agent_envs.retrieval.dense import DenseIndex

        dense = DenseIndex(index, options.dense)
        retriever = dense if engine == "dense" else FusedRetriever(index, dense)
    service = Service(retriever, engine=engine, num_passages=len(index.passages))
    serve(service, host=options.host, port=options.port)


_COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {"embed": _embed, "serve": _serve}


if __name__ == "__main__":
    main()

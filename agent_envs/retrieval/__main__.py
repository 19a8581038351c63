"""Index passages, embed them, and serve what was made; see `main`."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Final

from agent_envs.core.extras import require_extra
from agent_envs.errors import AgentEnvsError
from agent_envs.retrieval.corpus import Corpus, Retriever, load_passages
from agent_envs.retrieval.fusion import FusedRetriever
from agent_envs.retrieval.index import SavedIndex, save_index

PROGRAM: Final = "python -m agent_envs.retrieval"
_DEFAULT: Final = "default: %(default)s"
ENGINES: Final = ("bm25", "dense", "fused")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    ::

        python -m agent_envs.retrieval passages.jsonl.gz index       # BM25
        python -m agent_envs.retrieval embed index vectors --model sentence-transformers/...
        python -m agent_envs.retrieval serve index --dense vectors
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS.get(words[0]) if words else None
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
        epilog=f"`{PROGRAM} embed --help` and `{PROGRAM} serve --help` say what to do with it.",
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
    parser.add_argument("--query_prefix", default="", help="before a query, as 'query: ' for E5")
    parser.add_argument("--passage_prefix", default="", help="before a passage")
    parser.add_argument("--kind", default="Flat", help="of faiss (default: Flat, exact)")
    options = vars(parser.parse_args(arguments))
    index, folder = SavedIndex(options.pop("index")), options.pop("folder")
    embed_index(index, folder, **options)
    print(f"{len(index.passages):,} passages: {folder}")  # noqa: T201


def _serve(arguments: Sequence[str]) -> None:
    require_extra("serve", "A retrieval server", "starlette", "uvicorn")
    from agent_envs.retrieval.service import Service, ServiceLimits, serve

    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} serve", description="Serve an index by Search-R1's protocol."
    )
    parser.add_argument("index", help="folder of the index")
    parser.add_argument("--dense", help="folder of its embeddings")
    parser.add_argument("--engine", choices=ENGINES, help="default: fused with --dense, else bm25")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; nobody is asked")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    for limit in fields(ServiceLimits):
        parser.add_argument(f"--{limit.name}", type=int, default=limit.default, help=_DEFAULT)
    options = vars(parser.parse_args(arguments))
    host, port = options.pop("host"), options.pop("port")
    index, dense = SavedIndex(options.pop("index")), options.pop("dense")
    engine = options.pop("engine") or ("fused" if dense else "bm25")
    if (engine == "bm25") == bool(dense):
        parser.error("--engine dense and fused need --dense, and bm25 does not take it")
    service = Service(
        _open(engine, index, dense), engine=engine, num_passages=len(index.passages),
        limits=ServiceLimits(**options),
    )  # fmt: skip
    serve(service, host=host, port=port)


def _open(engine: str, index: SavedIndex, dense: str | None) -> Retriever:
    if dense is None:
        return index
    from agent_envs.retrieval.dense import DenseIndex

    by_meaning = DenseIndex(index, dense)
    return by_meaning if engine == "dense" else FusedRetriever(index, by_meaning)


COMMANDS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {"embed": _embed, "serve": _serve}


if __name__ == "__main__":
    main()

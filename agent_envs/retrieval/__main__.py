"""Command line: index passages, ``python -m agent_envs.retrieval passages.jsonl.gz index``."""

from collections.abc import Sequence

from agent_envs.core.command_line import CommandLineParser, counted, errors_of_one_line
from agent_envs.retrieval.corpus import Corpus, load_passages
from agent_envs.retrieval.index import save_index


def main(arguments: Sequence[str] | None = None) -> None:
    """Index files into a folder."""
    parser = CommandLineParser(
        prog="python -m agent_envs.retrieval", description="Index passages into a folder."
    )
    parser.add_argument("corpus", nargs="+", help="files with rows of 'title' and 'text'")
    parser.add_argument("folder", help="where to write the index; must be new")
    options = parser.parse_args(arguments)
    with errors_of_one_line("retrieval"):
        corpus = Corpus(passage for path in options.corpus for passage in load_passages(path))
        save_index(corpus, options.folder)
    print(f"{counted(len(corpus), 'passage')}: {options.folder}")  # noqa: T201


if __name__ == "__main__":
    main()

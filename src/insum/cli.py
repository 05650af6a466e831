"""The command ``insum``: bench, cache, doctor, explain, demo. Needs typer and rich, which are
imported only when it runs; what is here, and which version, it tells without them.
"""

# Annotations are evaluated here, unlike elsewhere: typer reads them, and its own names are known
# only inside the functions.

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

_INSTALL = (
    "the command line needs typer and rich, which are not installed ({error}): pip "
    "install 'insum[cli]'"
)


def main(arguments: list[str] | None = None) -> None:
    """What the console script runs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        told = _plainly(sys.argv[1:] if arguments is None else arguments)
        print(told or _INSTALL.format(error=error), file=sys.stdout if told else sys.stderr)
        sys.exit(0 if told else 1)
    application()(arguments, prog_name="insum")


def _plainly(arguments: list[str]) -> str:
    """What is told without typer and rich; nothing for all other commands."""
    match arguments:
        case ["--version"]:
            from insum import __version__

            return f"insum {__version__}"
        case ["doctor"]:
            from insum.doctor import report

            found = report()
            width = max(len(one.what) for one in found)
            marks = {True: "yes", False: "no "}
            return "\n".join(f"{o.what:{width}}  {marks[o.usable]}  {o.why}" for o in found)
    return ""


def application() -> "typer.Typer":
    """All commands."""
    import typer

    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
    )
    app.add_typer(
        _cache_commands(), name="cache", help="The memory of tuning: list, clear, export, import."
    )
    _add_version(app)
    _add_questions(app)
    _add_programs(app)
    return app


def _add_version(app: "typer.Typer") -> None:
    import typer

    def show_version(wanted: bool) -> None:
        if wanted:
            from insum import __version__

            typer.echo(f"insum {__version__}")
            raise typer.Exit

    @app.callback()
    def first(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """One line of indirect einsum, one fast sparse GPU kernel."""


def _add_questions(app: "typer.Typer") -> None:
    """What is here, and what a statement would do."""
    import typer

    @app.command()
    def doctor() -> None:
        """What is usable here, and why the rest is not."""
        from insum.doctor import report

        _print_table(
            "insum doctor",
            ("what", "", "why"),
            [(one.what, "ok" if one.usable else "--", one.why) for one in report()],
        )

    @app.command()
    def explain(
        statement: str,
        shape: Annotated[
            list[str] | None,
            typer.Option(
                help="A tensor: NAME=3,4:float32, or NAME=100:int32<7 for indices below 7."
            ),
        ] = None,
        size: Annotated[
            list[str] | None,
            typer.Option(help="An extent: NAME=8, or 0=8 for an output dimension."),
        ] = None,
        padded: Annotated[
            list[str] | None, typer.Option(help="Index tensors in which -1 is padding.")
        ] = None,
        gpu: Annotated[
            str, typer.Option(help="The architecture that the kernel is for; it need not be here.")
        ] = "sm_90",
    ) -> None:
        """What a statement would do: roles, graph, work, and the generated kernel where one can be
        written.
        """
        typer.echo(explained(statement, shape or [], size or [], padded or [], gpu))


def _add_programs(app: "typer.Typer") -> None:
    """Programs that read their options themselves."""
    import typer

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def demo(context: typer.Context) -> None:
        """A short tour on whatever device is there."""
        from insum import demo

        raise typer.Exit(demo.main(context.args))

    @app.command(
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        }
    )
    def bench(context: typer.Context) -> None:
        """The paper's tables and figures against the rivals that are here: block-spmm, spmm, conv,
        tensor-product, ablation, compilers, all, report; and what else is measured: gallery,
        survey, equivariant, fresh, sweep, unet, voxels, models, fusion, tuning, first-call,
        overhead, memory, formats, cpu, distributed, compare.
        """
        from insum.bench.main import main

        raise typer.Exit(main(context.args))


def _print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


# --- cache ----------------------------------------------------------------------------------------


def _cache_commands() -> "typer.Typer":
    import typer

    from insum.runtime import cache

    app = typer.Typer(no_args_is_help=True)

    @app.command("list")
    def list_() -> None:
        """Every remembered config."""
        rows = _remembered()
        typer.echo(f"{cache.folder()}: {len(rows)} entries")
        if rows:
            _print_table(
                "", ("statement", "sizes up to", "device", "µs", "first guess", "config"), rows
            )

    @app.command()
    def clear(
        kernels: Annotated[
            bool, typer.Option(help="Remove the sources of generated kernels too.")
        ] = True,
    ) -> None:
        """Forget everything."""
        typer.echo(f"{cache.folder()}: {cache.clear(kernels=kernels)} files removed")

    @app.command()
    def export(file: Path) -> None:
        """Write all entries to one file, to be shipped with a model."""
        typer.echo(f"{cache.export_file(file)} entries written to {file}")

    @app.command("import")
    def import_(
        file: Path,
        any_version: Annotated[
            bool, typer.Option(help="Also take entries that other versions wrote.")
        ] = False,
    ) -> None:
        """Take over the entries of an exported file."""
        try:
            taken, left = cache.import_file(file, any_version=any_version)
        except (OSError, ValueError, KeyError, TypeError) as error:
            typer.echo(f"{file}: {error}", err=True)
            raise typer.Exit(1) from None
        typer.echo(
            f"{taken} entries taken over"
            + (f", {left} of other versions left out (--any-version takes them)" if left else "")
        )

    return app


def _remembered() -> list[tuple[str, ...]]:
    """A row for every config of the cache."""
    from insum.plan.config import shown
    from insum.runtime import cache

    return [
        (
            e.statement,
            e.key.sizes,
            e.key.device,
            f"{e.microseconds:.1f}",
            f"{e.first_guess:.1f}",
            shown(e.choice),
        )
        for e in cache.entries()
    ]


# --- explain --------------------------------------------------------------------------------------


def explained(
    statement: str,
    shapes: list[str],
    sizes: list[str],
    padded: list[str],
    gpu: str = "sm_90",
) -> str:
    """`insum.explain` of a statement over tensors that are described by text; the kernel as a GPU
    would get it.
    """
    from insum.api import explain
    from insum.errors import InsumError

    try:
        tensors = dict(tensor_of(text) for text in shapes)
        given = {
            int(name) if name.isdigit() else name: int(size)
            for name, _, size in (text.partition("=") for text in sizes)
        }
        return str(explain(statement, sizes=given, padded=padded, gpu=gpu, **tensors))
    except (InsumError, ValueError) as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(1)


def tensor_of(text: str) -> tuple[str, Any]:
    """``A=3,4:float32`` as a name and a tensor of that kind; integers are sorted and below ``<N``,
    as indices are.

    >>> name, tensor = tensor_of("D=5:int32<3")
    >>> name, tensor.dtype, tensor.tolist()
    ('D', torch.int32, [0, 0, 1, 1, 2])
    """
    import torch

    name, _, rest = text.partition("=")
    shape, _, kind = rest.partition(":")
    kind, _, below = kind.partition("<")
    dtype = getattr(torch, kind or "float32", None)
    if not name.isidentifier() or not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{text!r} describes no tensor; write NAME=3,4:float32, or NAME=100:int32<7 for "
            "indices below 7"
        )
    extents = [int(extent) for extent in shape.split(",") if extent.strip()]
    if dtype.is_floating_point or dtype.is_complex:
        return name, torch.zeros(extents, dtype=dtype)
    count = torch.zeros(extents).numel()
    values = torch.arange(count) * int(below or 1) // max(1, count)
    return name, values.reshape(extents).to(dtype)


if __name__ == "__main__":
    main()

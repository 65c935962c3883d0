"""Native ops, which are compiled on the machine that runs them: compiler, headers, libaio, locks."""

from collections.abc import Iterable

from finetune.doctor.finding import Asked, Finding, failure, ok, warning


def ops(asked: Asked) -> Iterable[Finding]:
    """The ops that the launch needs; without a launch file all that any could need."""
    from finetune.backend import ops_look

    found = ops_look.look(asked.launch)
    needed = failure if asked.launch is not None else warning
    for op in found:
        if op.lacking is not None:
            what, install = op.lacking
            yield needed("native ops", f"{op.name}, for {op.used_by}, cannot be compiled: {what}", install)
        elif op.locked:
            yield warning(
                "native ops",
                f"{op.name}: there is a build lock",
                "wait if it is being built; else the next run, or `finetune ops`, removes it",
            )
        elif not op.built:
            yield warning(
                "native ops",
                f"{op.name}, for {op.used_by}, is not compiled yet: about {op.build_s:.0f} s on 2 cores",
                "run `finetune ops` ahead, or let the first run do it",
            )
    ready = [op.name for op in found if op.built and not op.locked and op.lacking is None]
    yield ok(
        "native ops", f"compiled: {', '.join(ready)}" if ready else "none needed" if not found else "none compiled"
    )

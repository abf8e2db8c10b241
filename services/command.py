"""The `tandem` command: `tandem serve` for one machine, `tandem frontend` and `tandem engine` as the pods run them.

Each service is imported only when it is asked for: a frontend's image has no torch, an engine's no tokenizer.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsError

from services.launcher.parent_death import end_with_parent

USAGE = """\
usage: tandem COMMAND [flags]

commands:
  serve      frontends and engines as processes of this machine, on loopback
  frontend   one frontend: HTTP, chat templates, tokenizing, detokenizing
  engine     one engine: scheduler, KV cache, model, sampler
  top        a running deployment, live in the terminal
  keygen     a folder of new keys for --link-keys: `tandem keygen FOLDER`

`tandem COMMAND --help` shows a command's flags and the environment variable of each."""

KEYGEN_USAGE = """\
usage: tandem keygen FOLDER

Makes a key pair for engines and one for frontends, in FOLDER, for the --link-keys of both. Of its four files an engine
needs engine.secret and frontend.public, a frontend frontend.secret and engine.public. Nothing is overwritten."""

Settings = TypeVar("Settings", bound=BaseSettings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (2 for a command line or setting that makes no sense)."""
    end_with_parent()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command in ("-V", "--version"):
        print(f"tandem {_version()}")
        return 0
    runners = {"serve": _serve, "frontend": _frontend, "engine": _engine, "top": _top, "keygen": _keygen}
    if command not in runners:
        likely = difflib.get_close_matches(command, runners, n=1)
        hint = f" (did you mean {likely[0]!r}?)" if likely else ""
        print(
            f"tandem: {f'there is no command {command!r}{hint}' if command else 'a command is needed'}\n\n{USAGE}",
            file=sys.stderr,
        )
        return 2
    return runners[command](arguments[1:])


def _serve(arguments: list[str]) -> int:
    from services.launcher.settings import ServeSettings

    settings = read_settings(ServeSettings, "tandem serve", arguments)
    from services.launcher.serve import run

    return run(settings)


def _frontend(arguments: list[str]) -> int:
    from services.frontend.settings import FrontendSettings

    settings = read_settings(FrontendSettings, "tandem frontend", arguments)
    if not settings.model and not settings.models:
        _refuse("tandem frontend", ["--model (or TANDEM_MODEL) is needed: a local folder, or a name on the hub"])
    if settings.workers > 1:
        from services.launcher.workers import run as run_workers

        return run_workers(settings)
    from services.frontend.main import run

    return run(settings)


def _engine(arguments: list[str]) -> int:
    from services.engine.settings import EngineSettings

    settings = read_settings(EngineSettings, "tandem engine", arguments)
    if not settings.model:
        _refuse("tandem engine", ["--model (or TANDEM_MODEL) is needed: a local folder, or a name on the hub"])
    from services.engine.main import run

    return run(settings)


def _top(arguments: list[str]) -> int:
    from services.top.settings import TopSettings

    settings = read_settings(TopSettings, "tandem top", arguments)
    from services.top.main import run

    return run(settings)


def _keygen(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(KEYGEN_USAGE, file=sys.stderr if arguments not in (["-h"], ["--help"]) else sys.stdout)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    from shared.link_keys import LinkKeysError, write_link_keys

    try:
        written = write_link_keys(Path(arguments[0]))
    except (LinkKeysError, OSError) as error:
        print(f"tandem keygen: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(str, written)))
    return 0


def read_settings(settings_class: type[Settings], program: str, arguments: list[str]) -> Settings:
    """Flags, then TANDEM_… variables, then defaults. Prints what is wrong and exits with 2 where something is."""
    prefix = settings_class.model_config.get("env_prefix", "")
    source = CliSettingsSource[Any](settings_class, cli_prog_name=program, cli_show_env_vars=True)
    parser = source.root_parser
    parser.usage = f"{program} [flags]"  # forty flags in a row would hide the error below them
    parser.allow_abbrev = False  # an abbreviation would change its meaning as flags are added
    try:
        return CliApp.run(settings_class, cli_args=arguments, cli_settings_source=source)
    except ValidationError as error:
        _refuse(program, [_describe(problem, prefix) for problem in error.errors(include_url=False)])
    except SettingsError as error:
        _refuse(program, [f'{error} (in a variable, it is JSON: TANDEM_MODELS=\'[{{"model": "some/folder"}}]\')'])


def _describe(problem: Any, prefix: str) -> str:
    """One of pydantic's errors, under the names that the user wrote. Keys are not repeated."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name, *rest = (str(part) for part in problem["loc"])
    value = "" if "key" in name or isinstance(problem["input"], dict) else f", not {problem['input']!r}"
    place = "".join(f"[{part}]" for part in rest)
    return f"--{name.replace('_', '-')}{place} (or {prefix}{name.upper()}): {message}{value}"


def _refuse(program: str, problems: list[str]) -> NoReturn:
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)
    print(f"`{program} --help` shows every flag.", file=sys.stderr)
    sys.exit(2)


def _version() -> str:
    try:
        return version("tandem")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())

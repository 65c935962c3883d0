"""Refuses Python code that a run's directory leads to, unless the person at the keyboard vouches for it.

A run directory may be a download, and its recipe may name files and modules or let code run that ships with the model.
A recipe that a person names is their word; one that lies in a run directory is not, unless this user started that run
on this machine. Then `run.json` has, under `code`, a signature of each thing that the recipe led to, by a secret that
lies in this user's home and never in a run directory. What is signed is where the code lies and, of code that is
written beside weights, its content: a signature that is copied into another run directory vouches for no other code.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from finetune.config.recipe_schema import NAMES_OF_CODE, Recipe
from finetune.utils import json_files
from finetune.utils.errors import RecipeError

SHIPPED = "model.trust_remote_code"
"""The key of a recipe by which code runs that ships with a model."""

_KEY_BYTES = 32


def check_code(run: Path, recipe: Recipe, runs: Iterable[str], weights: Path | None = None) -> None:
    """Refuses a run's recipe that leads to code which this user did not run here.

    Args:
        runs: Keys of `SHIPPED` and `NAMES_OF_CODE` whose code the caller runs.
        weights: A folder of the run's that is opened: its own code is that of `SHIPPED` as well.

    Raises:
        RecipeError: With the code that nobody vouches for.
    """
    named = _code_of(recipe)
    if weights is not None and SHIPPED in named and (content := _shipped_in(weights)) is not None:
        named[SHIPPED] = {**named[SHIPPED], f"the files in {weights}": [content]}
    secret, signed = _secret(), _signatures(run)
    for key in runs:
        for what, texts in named.get(key, {}).items():
            own = [] if secret is None else [_sign(secret, key, text) for text in texts]
            if not any(hmac.compare_digest(one, other) for one in own for other in signed.get(key, ())):
                raise RecipeError(
                    f"{run / 'recipe.yaml'} says {key}: {'true' if key == SHIPPED else what}, by which Python code "
                    f"{f'that ships with {what} ' if key == SHIPPED else ''}would run, and there is no record that "
                    "this user started the run on this machine. Read that code, and if you trust it add "
                    "--trust-remote-code (in Python: trust_remote_code=True)."
                )


def sign_code(run: Path, recipe: Recipe) -> dict[str, list[str]]:
    """Returns the signatures of the code that a recipe leads to, for `run.json`; none if the home cannot be written."""
    named = _code_of(recipe)
    secret = _secret(create=True) if named else None
    if secret is None:
        return {}
    signed = {key: [_sign(secret, key, texts[0]) for texts in code.values()] for key, code in named.items()}
    if SHIPPED in signed:  # checkpoints may be there from earlier starts
        signed[SHIPPED] = list(dict.fromkeys([*signed[SHIPPED], *_signatures(run).get(SHIPPED, ())]))
    return signed


def sign_weights(signed: Mapping[str, list[str]], folder: Path) -> dict[str, list[str]]:
    """Returns the signatures once this run has written its weights, and maybe code beside them, to a folder.

    Raises:
        OSError: If that cannot be read.
    """
    if SHIPPED not in signed or (content := _shipped_in(folder)) is None or (secret := _secret()) is None:
        return dict(signed)
    return {**signed, SHIPPED: list(dict.fromkeys([*signed[SHIPPED], _sign(secret, SHIPPED, content)]))}


def _code_of(recipe: Recipe) -> dict[str, dict[str, list[str]]]:
    """Returns, by key of the recipe and name of the code, the texts that may stand for it, the likeliest first."""
    named: dict[str, dict[str, list[str]]] = {}
    for key in NAMES_OF_CODE:
        section, _, field = key.partition(".")
        settings = getattr(recipe, section)
        value, arguments = getattr(settings, field) or (), settings.args if field == "name" else None
        names = (value,) if isinstance(value, str) else value
        code = {name: [json.dumps([_origin(name), arguments], sort_keys=True)] for name in names if ":" in name}
        if code:
            named[key] = code
    if recipe.model.trust_remote_code:
        # A tokenizer's too: it is opened under the same key.
        model, tokenizer = recipe.model, recipe.tokenizer
        named[SHIPPED] = {
            str(section.name): [json.dumps([location, section.revision]) for location in _places(section.name)]
            for section in (model, tokenizer)
            if section.name is not None
        } or {"model.config": ["model.config"]}
    return named


def _origin(name: str) -> list[str]:
    """Returns a name such as `file.py:object` or `package.module:object`, and where its code lies."""
    location, _, _ = name.rpartition(":")
    if location.endswith(".py"):
        return [name, str(Path(location).resolve())]
    # Found, and not imported.
    spec = PathFinder.find_spec(location.partition(".")[0], [str(Path.cwd()), *sys.path])
    locations = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return [name, *dict.fromkeys(str(Path(location).resolve()) for location in locations if location is not None)]


def _places(name: str) -> list[str]:
    folder = str(Path(name).resolve())
    # Of a run that has its weights, the folder that it began from may be gone.
    return [folder] if Path(name).is_dir() else [f"hub:{name}", folder]


def _shipped_in(folder: Path) -> str | None:
    """Returns the Python code in a folder with weights, and what its JSON files say of code; None without any."""
    code_files: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.py")):
        code_files[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    for file in sorted(folder.glob("*.json")):
        try:
            auto_maps = _values_of("auto_map", json_files.parse(file.read_bytes()))
        except ValueError as error:
            auto_maps = [str(error)]  # whoever can read it might find code there
        if auto_maps:
            code_files[file.name] = auto_maps
    return json.dumps({"files": code_files}, sort_keys=True) if code_files else None


def _values_of(key: str, tree: Any) -> list[Any]:
    own = [tree[key]] if isinstance(tree, dict) and key in tree else []
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return own + [value for item in items for value in _values_of(key, item)]


def _signatures(run: Path) -> dict[str, list[str]]:
    try:
        signatures = json_files.read(run / "run.json")["code"]
        return {str(key): [str(one) for one in signed] for key, signed in signatures.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _sign(secret: bytes, key: str, text: str) -> str:
    machine = ""  # its own number, where it has one: a home may be shared by several
    with suppress(OSError, ValueError):
        machine = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    return hmac.new(secret, json.dumps([machine, key, text]).encode(), hashlib.sha256).hexdigest()


def _secret(*, create: bool = False) -> bytes | None:
    """Returns this user's secret, if it is theirs alone; None if there is none, or it cannot be made."""
    try:
        state = os.environ.get("XDG_STATE_HOME", "")
        folder = (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "finetune"
        file = folder / "run-key"
        if create and not file.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".run-key.") as made:  # readable by this user alone
                made.write(secrets.token_bytes(_KEY_BYTES))
                made.flush()
                os.fsync(made.fileno())
                with suppress(FileExistsError):  # of two runs that start at once, one makes it
                    os.link(made.name, file)
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            facts, secret = os.fstat(opened.fileno()), opened.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError):
        return None
    mine_alone = facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o077
    return secret if mine_alone and len(secret) == _KEY_BYTES else None

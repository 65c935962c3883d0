"""Uploads an export to the hub."""

from pathlib import Path

from finetune.utils.errors import CheckpointError


def check_login(name: str) -> None:
    """Raises a `CheckpointError` if nobody is logged in to the hub, or it does not answer."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise CheckpointError(
            f"--push-to {name}: nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN; or leave "
            "--push-to out, and upload the folder later. Nothing was written."
        )
    try:
        HfApi().whoami()
    except Exception as error:  # the client's errors have many classes
        raise CheckpointError(
            f"--push-to {name}: the hub does not accept this login, or cannot be reached: "
            f"{' '.join(str(error).split())[:300]}. Nothing was written."
        ) from error


def push_folder(folder: Path, name: str) -> str:
    """Uploads a folder as a private model; returns its address.

    Raises:
        CheckpointError: If that fails; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        place = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=place.repo_id, folder_path=str(folder), commit_message="Export")
    except Exception as error:  # the client's errors have many classes
        raise CheckpointError(
            f"--push-to {name}: {' '.join(str(error).split())[:300]}. The export is whole, in {folder}: upload it with "
            f"`hf upload {name} {folder}`."
        ) from error
    return str(place)

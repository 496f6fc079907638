"""Manifests: a digest of every file of a folder, which shows that the folder is complete and unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, parse_json, read_bytes
from transformer_jax.training.totals import Totals

MANIFEST = "manifest.json"


def digests(folder: pathlib.Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, except the manifest, by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a manifest.

    Attributes:
      format_version: Version of the format.
      step: Step that the parameters belong to.
      sha256: Digest of every other file of the folder, by relative path.
      name: Name of the folder; "" in manifests older than this field.
      run: `RunFolder.identity` of the run; "" in manifests older than this field.
      totals: The run's totals, in a checkpoint that training resumes from.
    """

    format_version: int
    step: int
    sha256: dict[str, str]
    name: str = ""
    run: str = ""
    totals: Totals | None = None
    manifest_sha256: str = ""


def manifest_text(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest: JSON that includes a digest of itself."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps(manifest | {"manifest_sha256": digest}, indent=1)


def read_manifest(folder: pathlib.Path) -> Manifest | None:
    """Read the manifest of a folder; return None if it is absent or damaged."""
    try:
        content = read_bytes(folder / MANIFEST)
        fields = parse_json(content, dict[str, Any], str(folder / MANIFEST))
        manifest = convert(fields, Manifest, str(folder / MANIFEST))
    except UserError:
        return None
    fields.pop("manifest_sha256", None)
    return manifest if content == manifest_text(fields).encode() else None


def write_text_atomically(path: pathlib.Path, text: str) -> None:
    """Write a file so that even after a power failure it is either the old one or the complete new one."""
    draft = path.with_name(path.name + ".draft")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)

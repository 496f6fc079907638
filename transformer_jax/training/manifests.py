"""Manifests of folders: a digest of every file, by which a folder is known to be complete and unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

MANIFEST = "manifest.json"


def digests(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every file in a folder and below it, without the manifest, by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def manifest_text(manifest: dict[str, Any]) -> str:
    """The text of a manifest: JSON, with a digest of itself added."""
    own = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps(manifest | {"manifest_sha256": own}, indent=1)


def read_manifest(folder: pathlib.Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if it is absent or a byte of it was changed."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    content = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return manifest if text == manifest_text(content) else None


def write_text_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a file that is either the old one or the complete new one, also after a power cut."""
    draft = path.with_name(path.name + ".draft")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)

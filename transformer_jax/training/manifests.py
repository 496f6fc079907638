"""Manifests: a digest of every file of a folder, which shows that the folder is complete and unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

MANIFEST = "manifest.json"


def digests(folder: pathlib.Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, except the manifest, by relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def manifest_text(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest: JSON that includes a digest of itself."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps(manifest | {"manifest_sha256": digest}, indent=1)


def read_manifest(folder: pathlib.Path) -> dict[str, Any] | None:
    """Read the manifest of a folder; return None if it is absent or damaged."""
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
    """Write a file so that even after a power failure it is either the old one or the complete new one."""
    draft = path.with_name(path.name + ".draft")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)

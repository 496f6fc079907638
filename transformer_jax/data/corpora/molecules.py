"""Molecules as graphs: atoms and bonds of a SMILES text with features, by RDKit."""

from __future__ import annotations

from typing import Any

import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.limits import NODES

_HYBRIDIZATIONS = ("SP", "SP2", "SP3", "SP3D", "SP3D2")
_CHIRALITIES = ("CHI_UNSPECIFIED", "CHI_TETRAHEDRAL_CW", "CHI_TETRAHEDRAL_CCW")
_BONDS = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
_STEREO = ("STEREONONE", "STEREOZ", "STEREOE", "STEREOCIS", "STEREOTRANS")
# Number of values of each feature of an atom: element, charge, hydrogens, hybridization, chirality, and whether
# it is aromatic and in a ring (Hu et al. 2020, "Open Graph Benchmark", without degree and radicals).
ATOM_VALUES = (119, 11, 9, len(_HYBRIDIZATIONS) + 1, len(_CHIRALITIES) + 1, 2, 2)
# Number of values of each feature of a bond: type, stereochemistry, and whether it is conjugated and in a ring.
BOND_VALUES = (len(_BONDS) + 1, len(_STEREO) + 1, 2, 2)


def _parsed(smiles: str, place: str) -> Any:
    """Return RDKit's molecule.

    Raises:
      UserError: RDKit is not installed; or the text contains white space, is not valid SMILES, or has no atoms
        or too many.
    """
    if len(smiles.split()) > 1:  # RDKit would take the rest for a name
        raise UserError(f"{place}: white space in {smiles[:60]!r}: write one molecule without a name")
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise UserError("molecules need RDKit: pip install 'transformer_jax[graphs]'") from None
    with rdBase.BlockLogs():  # otherwise it prints several lines
        molecule = Chem.MolFromSmiles(smiles.strip())
    if molecule is None:
        raise UserError(f"{place}: {smiles[:60]!r} is not a valid SMILES")
    if not molecule.GetNumAtoms():
        raise UserError(f"{place}: a molecule without atoms")
    NODES.check(molecule.GetNumAtoms(), f"{place}: the number of atoms")
    return molecule


def _index(names: tuple[str, ...], name: Any) -> int:
    """Return the index of `name` in `names`, or `len(names)` if it is not one of them."""
    return names.index(str(name)) if str(name) in names else len(names)


def read_smiles(smiles: str, place: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert a SMILES text to a graph.

    Args:
      smiles: The text.
      place: Description of the molecule, for messages.

    Returns:
      The fields of a `Graph`: atoms (n, 7), bonds (m, 2) and their features (m, 4), int32.

    Raises:
      UserError: RDKit is not installed; or the text contains white space, is not valid SMILES, or has no atoms
        or too many.
    """
    molecule = _parsed(smiles, place)
    atoms = [
        (
            min(atom.GetAtomicNum(), 118), min(max(atom.GetFormalCharge() + 5, 0), 10),
            min(atom.GetTotalNumHs(), 8), _index(_HYBRIDIZATIONS, atom.GetHybridization()),
            _index(_CHIRALITIES, atom.GetChiralTag()), int(atom.GetIsAromatic()), int(atom.IsInRing()),
        )
        for atom in molecule.GetAtoms()
    ]  # fmt: skip
    bonds = list(molecule.GetBonds())
    ends = [(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in bonds]
    features = [
        (
            _index(_BONDS, bond.GetBondType()), _index(_STEREO, bond.GetStereo()),
            int(bond.GetIsConjugated()), int(bond.IsInRing()),
        )
        for bond in bonds
    ]  # fmt: skip
    return (
        np.array(atoms, np.int32),
        np.array(ends, np.int32).reshape(-1, 2),
        np.array(features, np.int32).reshape(-1, len(BOND_VALUES)),
    )


def scaffold(smiles: str) -> str:
    """Return a molecule's rings and the chains between them as SMILES (Bemis & Murcko 1996); "" without rings.

    Raises:
      UserError: See `read_smiles`.
    """
    molecule = _parsed(smiles, smiles)
    from rdkit.Chem.Scaffolds import MurckoScaffold

    return MurckoScaffold.MurckoScaffoldSmiles(mol=molecule)


def layout(smiles: str) -> tuple[np.ndarray, list[str]]:
    """Return two-dimensional positions (n, 2) of a molecule's atoms for a picture, and their symbols.

    Raises:
      UserError: See `read_smiles`.
    """
    molecule = _parsed(smiles, smiles)
    from rdkit.Chem import rdDepictor

    rdDepictor.Compute2DCoords(molecule)
    positions = molecule.GetConformer().GetPositions()[:, :2]
    return np.asarray(positions), [atom.GetSymbol() for atom in molecule.GetAtoms()]

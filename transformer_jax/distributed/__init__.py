"""The mesh, where parameters lie on it, the processes of a run, and the collectives of a program."""

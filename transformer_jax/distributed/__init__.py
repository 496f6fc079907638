"""The mesh, the sharding of parameters, the processes of a run, and the collectives of a program."""

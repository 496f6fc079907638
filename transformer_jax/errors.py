"""Errors that a user can fix; each message names the value, the limit and the remedy in one line."""


class UserError(Exception):
    """An invalid flag, file or folder, detected before any device work.

    Commands print only the message, without a traceback, and exit with status 2.
    """


class CompilerError(UserError):
    """A program that the compiler rejected; a search over programs reports it and continues with the next."""

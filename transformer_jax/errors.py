"""Errors that a user can mend: one line that names the value, the limit and the way out."""


class UserError(Exception):
    """A wrong flag, file or folder, found before any device work.

    Command lines print the message alone, without a traceback, and exit with status 2.
    """


class CompilerError(UserError):
    """A compiler's refusal of a program: no wrong value, so a search among programs says it and goes on."""

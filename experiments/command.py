"""How a command ends: one clear line and a status for what a user can mend."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from transformer_jax.errors import UserError
from transformer_jax.training.loop import Stopped


def run_command(
    main: Callable[[], None],
    *,
    interrupted: str = "interrupted; the same command goes on from the last checkpoint",
) -> int:
    """Runs a command; returns its exit status: 0, 2 after a user's error, 130 when it was stopped.

    `interrupted` is what Ctrl-C is answered with.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    except Stopped as stop:
        print(str(stop), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has stopped: nothing is left to be said.
        sys.stderr.close()
        return 141
    return 0

"""What the commands do, one file each; `console` holds the console script `transformer-jax`."""

from transformer_jax.distributed.startup_logs import import_jax_quietly

# Every command imports JAX, after this package.
import_jax_quietly()

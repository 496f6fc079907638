"""What the commands do, one file each; `console` holds the console script `transformer-jax`."""

"""Tasks that a tiny model learns on two cores, each the example of a how-to."""

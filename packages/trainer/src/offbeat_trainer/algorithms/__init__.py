"""What is optimized, as small pure functions: advantages, KL estimates, aggregation, and the losses made of them."""

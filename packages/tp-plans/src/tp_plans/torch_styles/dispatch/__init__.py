"""Expert parallelism on torch: tokens sent to the ranks of their experts, and back."""

"""Rules inferred from a model's structure: complete a plan, suggest one, derive its sequence-parallel form."""

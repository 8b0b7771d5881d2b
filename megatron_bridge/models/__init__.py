"""Model families as tables of canonical tensors."""

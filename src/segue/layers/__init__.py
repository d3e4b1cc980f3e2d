"""Building blocks of models: modules and functions of tensors."""

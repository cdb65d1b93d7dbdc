"""The updates of the inner optimizers: how a parameter moves by its gradient."""

"""F4: nn.Modules over the operations."""

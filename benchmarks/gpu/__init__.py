"""The GPU data plane: checked against the CPU reference, then timed against one large copy."""

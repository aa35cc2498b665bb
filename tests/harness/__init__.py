"""What the one test body is made of: axes from declarations, oracles, error bounds, poisoned allocations."""

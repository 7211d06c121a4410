"""What a step should cost: model shapes and physical floors. Standard library only."""

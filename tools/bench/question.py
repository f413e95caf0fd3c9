"""What all contenders are asked. Imports nothing, so that a child's start is its contender's own."""

OURS = "skerry"
QUESTION = "Name three colours."


def prompt(n: int) -> list[int]:
    """Token ids to measure with; a shorter prompt begins a longer one."""
    return [100 + i % 1000 for i in range(n)]

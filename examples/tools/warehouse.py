"""The tools of an episode. Each episode has its own object."""


class Warehouse:
    """Articles of a warehouse, from the row's column ``stock``."""

    def __init__(self, task):
        self.stock = task.row["stock"]

    def list_articles(self) -> list[str]:
        """The names of all articles."""
        return sorted(self.stock)

    def look_up(self, article: str) -> dict[str, int]:
        """Number and price of an article.

        Args:
            article: its name, as the list has it
        """
        return self.stock[article]

    def multiply(self, first: int, second: int) -> int:
        """The product of two numbers."""
        return first * second

    def add(self, numbers: list[int]) -> int:
        """The sum of numbers."""
        return sum(numbers)

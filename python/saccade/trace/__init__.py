"""Python callables to text of the language."""

"""Plain data that the packages pass to each other: frozen dataclasses that turn into JSON and back."""

"""How checks say that a contract is broken."""


def require(kept: bool, message: str) -> None:
    """Raise an `AssertionError` with this message unless the contract is kept."""
    if not kept:
        raise AssertionError(message)

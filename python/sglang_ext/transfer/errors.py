"""How a transfer fails."""


class TransferError(Exception):
    """A write did not happen, or it is not known whether all of it did."""

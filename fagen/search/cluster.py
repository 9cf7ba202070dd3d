"""x."""

from fagen.search.lab import LocalLab, Work


class ClusterLab(LocalLab):
    """x."""

    def __init__(self, address: str, work: Work) -> None:
        raise NotImplementedError

"""Progress of a worker's loop over batches, for the run's reports."""

from __future__ import annotations


class LoopProgress:
    """A loop over batches, within a loop over epochs or by itself.

    Attributes:
        done: the part of the outer loop that is done, from 0 to 1; 0 before the first.
    """

    def __init__(self) -> None:
        self.done = 0.0
        self._epoch, self._epochs = 0, 1

    def begin_epoch(self, number: int, epochs: int) -> None:
        """Note that an epoch begins: so many of these were done before it."""
        self._epoch, self._epochs = number, epochs
        self.done = number / epochs

    def take_batch(self, number: int, batches: int) -> None:
        """Note that a batch is taken: so many of the epoch's, or of the loop's, were done before
        it."""
        self.done = (self._epoch + min(number / batches, 1.0)) / self._epochs

    def end_epochs(self) -> None:
        """Note that the loop over epochs has ended; what comes is by itself."""
        self.done, self._epoch, self._epochs = 1.0, 0, 1

"""A tensor that grows by rows: appending copies the new rows only, most of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Rows:
    """Rows along the second to last axis, in order; room doubles when it runs out."""

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None
        self._num = 0

    @property
    def all(self) -> torch.Tensor:
        """All rows, [..., rows, D]: a view, to be read before the next ``append``.

        Raises
        ------
        ValueError
            If there are none yet.
        """
        if self._room is None:
            msg = "no rows were appended yet"
            raise ValueError(msg)
        return self._room[..., : self._num, :]

    def append(self, rows: torch.Tensor) -> None:
        """Add rows at the end.

        The first ones, and those that follow them in the caller's own tensor, are shared with the
        caller and not copied.
        """
        end = self._num + rows.shape[-2]
        if self._room is None:
            self._room, self._num = rows, end
            return
        if self._goes_on(rows):
            shape = (*rows.shape[:-2], end, rows.shape[-1])
            self._room, self._num = self._room.as_strided(shape, rows.stride()), end
            return
        if end > self._room.shape[-2]:
            room = rows.new_empty(*rows.shape[:-2], max(end, 2 * self._num), rows.shape[-1])
            room[..., : self._num, :] = self.all
            self._room = room
        self._room[..., self._num : end, :] = rows
        self._num = end

    def _goes_on(self, rows: torch.Tensor) -> bool:
        """Whether rows stand right behind the last ones, in a tensor that was never copied."""
        room = self._room
        return (
            room is not None
            and room.shape[-2] == self._num
            and room.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
            and room.stride() == rows.stride()
            and rows.storage_offset() == room.storage_offset() + self._num * room.stride(-2)
        )

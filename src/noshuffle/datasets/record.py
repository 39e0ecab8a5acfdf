"""DataSet: tensors in their natural order, and what a model needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from noshuffle.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and held-out examples. The order of the training rows is the order of training.

    `units` gives the id of the unit (writer, speaker, …) of every training row where there is one;
    otherwise every row is a unit of its own. `classes` is how many there are, or, where `y` are
    numbers with a point (regression), how many a row has. `is_test_public` declares the held-out
    examples public; ε does not cover them, and a report says so where they are not.
    """

    name: str
    kind: str  # "image", "table" or "text"
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    units: Tensor | None = None
    is_test_public: bool = False

    def __post_init__(self) -> None:
        train, test = (self.x_train, self.y_train), (self.x_test, self.y_test)
        for part, (x, y) in (("train", train), ("test", test)):
            if not isinstance(x, Tensor) or len(x) != len(y):
                raise InvalidInput(f"{self.name}: x and y of the {part} part differ in length")
        if self.units is not None and len(self.units) != len(self.x_train):
            raise InvalidInput(f"{self.name}: units must have one id for each training row")

    def __len__(self) -> int:
        return len(self.x_train)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

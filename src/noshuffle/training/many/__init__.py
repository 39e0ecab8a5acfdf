"""Many runs of a small model side by side, for studies (docs/studies.md)."""

from __future__ import annotations

from noshuffle.training.many.setting import Setting, joint_mu
from noshuffle.training.many.study import Batch, Study, accuracies, train_many

__all__ = ["Batch", "Setting", "Study", "accuracies", "joint_mu", "train_many"]

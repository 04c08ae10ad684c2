"""Which steps are updated beside backward (overlap="early" and "auto"), and by which guess. The core compares the guess
with what step() then asks for, and updates again where they differ: a choice changes time, never a bit."""

import math
import time

from smartinf import _core


class EarlyUpdates:
    """Remembers of the steps what the next one is likely to be like.

    taking_part: for each parameter whether it took part in the last step; None: there was none.
    loss_scale: what GradScaler multiplied its gradients by.
    """

    def __init__(self, overlap):
        self._overlap = overlap  # "late", "early", "auto"; None: no overlap
        self._norm = 0.0
        self._late_exposed = 0.0  # share of the last late step that was waited for
        self._ended = None  # when the last step did
        self.taking_part, self.loss_scale = None, 1.0

    def wanted(self, norm_max, possible):
        """Whether the next update is to be an early one. norm_max: what is clipped; 0: nothing. possible: the
        devices can do it."""
        if self._overlap == "auto":
            return possible and _core.early_update_pays(self._norm, norm_max, self._late_exposed, False)
        return self._overlap == "early"

    def stepped(self, session, norm, loss_scale, exposed_s):
        now = time.monotonic()
        if session.overlap == "late" and self._ended is not None:
            self._late_exposed = exposed_s / max(now - self._ended, 1e-9)
        self._norm = norm if math.isfinite(norm) else 0.0
        self.taking_part, self.loss_scale, self._ended = session.taking_part, loss_scale, now

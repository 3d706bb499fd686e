"""Consistency policies: when gradients are applied, and who waits for whom. Pure.

For a policy of your own: `from paramserve.consistency import Admit, Apply, Drop, Wait`.
"""

from __future__ import annotations

from paramserve.consistency.base import Admit as Admit
from paramserve.consistency.base import Apply as Apply
from paramserve.consistency.base import Buffer as Buffer
from paramserve.consistency.base import Drop as Drop
from paramserve.consistency.base import GroupView as GroupView
from paramserve.consistency.base import Pull as Pull
from paramserve.consistency.base import Push as Push
from paramserve.consistency.base import Wait as Wait

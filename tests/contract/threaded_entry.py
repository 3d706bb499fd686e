"""An entry whose module starts a thread when it is imported: its process must not be forked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramserve.engine.child import Bootstrap

threading.Thread(target=threading.Event().wait, name="of-the-module", daemon=True).start()


def tell(boot: Bootstrap) -> None:
    boot.report("threads", str(threading.active_count()).encode())
